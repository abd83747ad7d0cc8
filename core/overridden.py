"""What takes the place of a part of the update where a module overrides it: the step, the clipping, the clearing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from .errors import ConfigurationError
from .hooks import call
from .plugins import StepResult

if TYPE_CHECKING:
    from .run import Run


class OptimizerView:
    """Stands for an optimizer: everything but what a subclass has is the optimizer's own."""

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        self.optimizer = optimizer
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The optimizer's, for isinstance."""
        return type(self.optimizer)


class StepOnce(OptimizerView):
    """What an override of `Module.optimizer_step` gets: ``step`` is the second half of the update, once."""

    def __init__(self, optimizer: Optimizer, run: Run, apply: Callable[[], StepResult]) -> None:
        super().__init__(optimizer, run)
        self._apply = apply
        self.result: StepResult | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce, unscale, check, clip, step. The closure only returns the loss, whose gradients are there already."""
        if self.result is not None:
            raise ConfigurationError("optimizer.step() was called twice in one optimizer_step; an update is one step.")
        value = closure() if closure is not None else None
        self.result = self._apply()
        return value


def own_step(run: Run) -> Callable[..., StepResult]:
    """A replacement for `Strategy.optimizer_step` that goes through `Module.optimizer_step`."""

    def optimizer_step(root: nn.Module, optimizers: Sequence[Optimizer], **options: Any) -> StepResult:
        def apply() -> StepResult:
            return run.engine.strategy.optimizer_step(root, optimizers, **options)

        if not optimizers or run.micro is None:
            return apply()
        output = run.micro.output
        loss = output["loss"] if isinstance(output, Mapping) else output
        view = StepOnce(optimizers[0], run, apply)
        run.module.optimizer_step(run.progress.epoch, run.micro.index, view, lambda: loss)
        return view.result or StepResult(applied=False)

    return optimizer_step


def own_clipping(run: Run) -> Callable[[Optimizer], None]:
    """What comes before the step where `Module.configure_gradient_clipping` rules: it is called between two others."""
    clip = run.engine.clip
    value, algorithm = (None, None) if clip is None else (clip.value, clip.algorithm)

    def before_step(optimizer: Optimizer) -> None:
        call(run.hooks.on_before_optimizer_step, optimizer)
        run.clipping = True
        run.module.configure_gradient_clipping(optimizer, value, algorithm)
        run.clipping = False

    return before_step
