"""Manual optimization: what ``self.optimizers()`` returns when the module steps its optimizers itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from . import gradients, losses
from .errors import ConfigurationError
from .hooks import call
from .layout import distribute, sharded
from .overridden import OptimizerView
from .plugins import Clip, StepResult
from .torch_compat import version

if TYPE_CHECKING:
    from .run import Run


# kinds of gradients in a checkpoint: those of parameters, and those put aside within an accumulated update
GRADIENT, ASIDE = "gradient/", "aside/"


class ManualOptimizer(OptimizerView):
    """An optimizer whose ``step`` keeps the order of an update: reduce, unscale, check, clip, step.

    In the inner micro-batches of an accumulated update ``step`` puts this optimizer's gradients aside, and the last one
    joins them: so ``zero_grad``, backward and ``step`` can be written as without accumulation, for any number of
    optimizers.
    """

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        super().__init__(optimizer, run)
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._spent: dict[nn.Parameter, tuple[ref[Tensor], int]] = {}  # gradients that a step took, as it left them

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let only this optimizer's parameters require gradients. Gradients are averaged at the step in any case."""
        toggle(self._run, self)
        try:
            yield
        finally:
            untoggle(self._run)

    def zero_grad(self, set_to_none: bool = True) -> None:
        call(self._run.hooks.on_before_zero_grad, self.optimizer)
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step; with a closure (LBFGS) only on one process, without clipping, accumulation or loss scaling."""
        run = self._run
        if closure is not None:
            return self._step_with_closure(closure)
        params = gradients.parameters([self.optimizer])
        if run.micro is not None and not run.micro.last:
            for param in params:
                if param.grad is not None:
                    held = self._aside.get(param)
                    self._aside[param] = param.grad if held is None else held + param.grad
                    param.grad = None
            return None
        for param, held in self._aside.items():
            param.grad = held if param.grad is None else param.grad + held
        self._aside = {}
        engine = run.engine
        weighted = engine.scaler is not None or (run.micro is not None and run.micro.weight is not None)
        if weighted and not run.backwards:
            raise ConfigurationError(
                "optimizer.step() was called without self.manual_backward(loss) before: the loss has to be scaled "
                "(fp16) or weighted by its samples. Write self.manual_backward(loss) instead of loss.backward()."
            )
        run.stepping = True
        clip = run.manual_clips.pop(self.optimizer, engine.clip)
        result = engine.strategy.optimizer_step(
            engine.root, [self.optimizer], clip=clip, scaler=engine.scaler, before_step=run.before_step
        )
        run.stepping = False
        self._spend(params)
        torch.clear_autocast_cache()  # the step runs inside autocast, which would go on with casts of the old weights
        run.manual_results.append(result)
        return None

    def _spend(self, params: list[nn.Parameter]) -> None:
        self._spent = {param: (ref(param.grad), _written(param.grad)) for param in params if param.grad is not None}

    def pending(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Gradients that no step has taken yet: their kind, parameter and value."""
        for param in gradients.parameters([self.optimizer]):
            if (grad := param.grad) is not None:
                spent, then = self._spent.get(param, (None, 0))
                if spent is None or spent() is not grad or _written(grad) != then:
                    yield GRADIENT, param, grad
        for param, held in self._aside.items():
            yield ASIDE, param, held

    def owe(self, kind: str, param: nn.Parameter, value: Tensor) -> None:
        """The reverse of `pending`."""
        if kind == ASIDE:
            self._aside[param] = value
        else:
            param.grad = value

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        run = self._run
        wrong = [
            what
            for what, present in (
                (f"{run.world.world_size} processes", run.world.world_size > 1),
                ("gradient clipping", run.engine.clip is not None or self.optimizer in run.manual_clips),
                ("accumulation", run.accumulate > 1),
                ("loss scaling (fp16-mixed)", run.engine.scaler is not None),
            )
            if present
        ]
        if wrong:
            raise ConfigurationError(
                f"optimizer.step(closure) evaluates the loss inside the step, which cannot work with "
                f"{', '.join(wrong)}. Use --strategy single without clipping, accumulation or fp16, or an "
                "optimizer without closure."
            )
        call(run.hooks.on_before_optimizer_step, self.optimizer)

        def evaluate() -> Any:
            torch.clear_autocast_cache()  # the optimizer has moved the weights since the last evaluation
            return closure()

        run.stepping = True
        value = self.optimizer.step(evaluate)
        run.stepping = False
        self._spend(gradients.parameters([self.optimizer]))
        torch.clear_autocast_cache()
        run.manual_results.append(StepResult())
        return value


def _written(grad: Tensor) -> int:
    """Changes with each backward that adds to a gradient. FSDP adds to the part that this rank has."""
    found = sharded(grad)
    return version(grad if found is None else found.to_local())


# ------------------------------------------------------------------------------------ gradients between two updates


def pending(run: Run) -> dict[str, Tensor]:
    """Gradients that no step has taken yet, by their names in a checkpoint. All ranks call it.

    One that is sharded, and that of a single process, is the mean over all ranks; others are this rank's share of it.
    """
    if run.module.automatic_optimization:
        return {}
    found = {}
    for optimizer in run.optimizers():
        for kind, param, value in optimizer.pending():
            if name := run.engine.names.get(param):
                complete = run.world.world_size == 1 or sharded(value) is not None
                found[f"{'all' if complete else f'rank{run.world.rank}'}/{kind}{name}"] = value
    return found


def is_pending(name: str) -> bool:
    """Whether a name of `TrainState.strategy` is one of `pending`."""
    return name.partition("/")[2].startswith((GRADIENT, ASIDE))


def load_pending(run: Run, state: Mapping[str, Tensor], world_size: int | None) -> None:
    """The reverse of `pending`, of a checkpoint of so many processes."""
    if run.module.automatic_optimization:
        return
    params = {name: param for param, name in run.engine.names.items()}
    lost = []
    for optimizer in run.optimizers():
        mine = set(gradients.parameters([optimizer]))
        for full, value in state.items():
            owner, _, rest = full.partition("/")
            kind, _, name = rest.partition("/")
            param = params.get(name)
            if not is_pending(full) or param not in mine:
                continue
            layout = sharded(param)
            if owner != "all" and (world_size != run.world.world_size or layout is not None):
                lost.append(name)
                continue
            if layout is not None and sharded(value) is None:
                value = distribute(value, layout)
            optimizer.owe(f"{kind}/", param, value.to(param.device, param.dtype))
    if lost:
        warnings.warn(
            f"the checkpoint holds gradients that no step had taken, of each rank of another layout: {sorted(lost)[:3]}"
            f"{' and more' if len(lost) > 3 else ''}. They are left out. Go on with the strategy and the number of "
            "processes that wrote it, or save where all optimizers have stepped.",
            stacklevel=2,
        )


def backward(run: Run, loss: Tensor, options: dict[str, Any]) -> None:
    """Backward of a loss that is weighted by its micro-batch and scaled as the run needs it."""
    run.backwards += 1
    given, run.backward.options = loss, options
    try:
        if run.micro is not None and run.micro.weight is not None:
            loss = loss * run.micro.weight
        if run.engine.scaler is not None:
            loss = loss * run.engine.scaler.scale
        run.engine.strategy.backward(run.engine.root, loss)
    except (RuntimeError, AttributeError, TypeError) as error:
        at_fault = None if "gradient" in options else losses.refused(given, run.engine.device, "manual_backward got")
        if at_fault is None:
            raise
        raise at_fault from error


def clip_gradients(run: Run, optimizer: Any, value: float | None, algorithm: str | None) -> None:
    """`Module.clip_gradients`: now where gradients are complete, under manual optimization at the next step."""
    if not value:
        return
    clip = Clip(float(value), algorithm or "norm")
    raw = raw_optimizer(optimizer)
    if run.clipping:
        norm = run.engine.strategy.clip_(gradients.parameters([raw]), clip)
        if norm is not None:
            run.train_metrics.values["grad_norm"] = norm
    elif not run.module.automatic_optimization:
        run.manual_clips[raw] = clip
    else:
        raise ConfigurationError(
            "clip_gradients() was called outside of configure_gradient_clipping, where gradients are not complete. "
            "Override configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm) and call it "
            "there, or use Trainer(gradient_clip_val=...)."
        )


def raw_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer itself, of one that `Module.optimizers` gave, too."""
    found: Optimizer = vars(optimizer)["optimizer"] if type(optimizer) is ManualOptimizer else optimizer
    return found


def guard(run: Run, optimizer: Optimizer) -> RemovableHandle:
    """Refuse steps of the optimizer itself in a run: they would neither be reduced over ranks nor be counted."""

    def check(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not run.stepping:
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() was called on the optimizer itself. Take it from "
                "self.optimizers(), whose step() averages gradients over the ranks, unscales, clips and is counted."
            )

    return optimizer.register_step_pre_hook(check)


def toggle(run: Run, optimizer: Any) -> None:
    """Let only this optimizer's parameters require gradients; remember what was before."""
    mine = set(gradients.parameters([raw_optimizer(optimizer)]))
    for param in gradients.parameters(run.engine.optimizers):
        if param not in run.toggled:
            run.toggled[param] = param.requires_grad
        param.requires_grad_(run.toggled[param] and param in mine)


def untoggle(run: Run) -> None:
    """Give every parameter back what it had before `toggle`."""
    for param, requires_grad in run.toggled.items():
        param.requires_grad_(requires_grad)
    run.toggled = {}
