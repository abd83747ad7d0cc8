"""Engine: the composed parts of a run, and the one place where the order of building matters."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import materialize
from .batchnorm import synchronise
from .configured import Schedule, check_optimizers, read_optimizers
from .errors import ConfigurationError
from .hooks import SHORTER, call, takes_only
from .plugins import Accelerator, Clip, Context, Precision, Strategy
from .scaling import LossScaler

if TYPE_CHECKING:
    from .capabilities import Plan
    from .hooks import Hooks
    from .launch.world import World


class StepModule(nn.Module):
    """A module whose forward is one of the user's steps, inside the precision's context, on a cast batch.

    Strategies wrap or shard this module, so that the step runs inside their own forward.
    """

    _user: nn.Module

    def __init__(self, module: nn.Module, precision: Precision, context: AbstractContextManager[Any] | None) -> None:
        super().__init__()
        self.module = module
        object.__setattr__(self, "_user", module)  # not looked up among the submodules at every step
        self.context = context
        casts = type(precision).cast_batch is not Precision.cast_batch
        self.cast: Callable[[Any], Any] | None = precision.cast_batch if casts else None
        # steps that the user wrote without batch_idx
        self.short = frozenset(step for step in SHORTER if takes_only(getattr(module, step, None), 1))
        self.compiled: dict[str, Callable[..., Any]] = {}
        self.graphed = False  # whether compiled steps write into the same memory each time, as CUDA graphs do
        self.plain = not casts and self.context is None and not self.short  # nothing between the caller and the step

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """``step`` names a method of the user's module; the rest are its arguments."""
        if self.plain:
            return getattr(self._user, step)(*args, **kwargs)
        if self.cast is not None:
            args = tuple(map(self.cast, args))
        if self.short and step in self.short:
            args = args[:1]
        if self.compiled:
            with self.context or nullcontext():
                if not self.graphed:
                    return self.compiled[step](*args, **kwargs)
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                return _own(self.compiled[step](*args, **kwargs))
        if self.context is None:
            return getattr(self._user, step)(*args, **kwargs)
        with self.context:
            return getattr(self._user, step)(*args, **kwargs)


GRAPHS = ("reduce-overhead", "max-autotune")  # the modes of torch.compile that replay CUDA graphs


def _own(output: Any) -> Any:
    """What a step returned, in memory that the next one does not write into."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(output, Tensor, Tensor.clone)


@contextmanager
def compiling(options: Mapping[str, Any] | None) -> Iterator[None]:
    """Around a run that compiles: dynamo asks tensors that live across a break of the graph for ``grad``, and warns."""
    with warnings.catch_warnings():
        if options is not None:
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


@dataclass
class Engine:
    """Strategy, accelerator, precision and the user's module, put together. ``root`` is what training calls."""

    module: nn.Module
    strategy: Strategy
    accelerator: Accelerator
    precision: Precision
    device: torch.device
    step: StepModule
    root: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    scaler: LossScaler | None = None
    clip: Clip | None = None
    names: dict[Tensor, str] = field(default_factory=dict)
    moves: bool = False
    lazy: bool = False  # whether the device computes nothing before an update ends

    def move(self, batch: Any) -> Any:
        """A batch on the run's device."""
        return self.accelerator.to_device(batch, self.device) if self.moves else batch


def build(
    module: nn.Module,
    *,
    plan: Plan,
    strategy: Strategy,
    accelerator: Accelerator,
    precision: Precision,
    world: World,
    device: torch.device,
    clip: Clip | None = None,
    late: bool = False,
    sync_batchnorm: bool = False,
    train: bool = True,
    restored: bool = False,
    backward: Callable[[Tensor], None] = Tensor.backward,
    same_on_all_ranks: Callable[[str, Sequence[str]], None] = lambda what, names: None,
    configure_optimizers: Callable[[], Any] | None = None,
    compiled: Mapping[str, Any] | None = None,
) -> Engine:
    """Put the parts together. Called on all ranks; the order below is the only right one.

    Layers exist before they are converted, are converted before they are sharded, are sharded before an optimizer sees
    them, and an optimizer is adapted before it has state.
    """
    configure_model = getattr(module, "configure_model", None)
    if configure_model is not None:
        with torch.device("meta") if strategy.meta else nullcontext():
            configure_model()
    if sync_batchnorm and world.world_size > 1:
        module = synchronise(module, device.type)
    before = [weakref.ref(param) for param in module.parameters()]  # weak: the whole model must not stay in memory
    entered = precision.forward_context(device.type)  # first: what is converted to may depend on the device
    module = precision.convert(module)
    if strategy.meta:
        materialize.place_(module, device)
    else:
        module = materialize.move(module, device)
    step = StepModule(module, precision, entered)
    manual = not getattr(module, "automatic_optimization", True)
    moves, lazy = accelerator.moves_batches, "lazy_devices" in accelerator.needs.strategy
    if compiled is not None:
        if lazy and "backend" not in compiled:
            raise ConfigurationError(
                f"compile=True is for torch's Inductor, which does not know the device type {device.type!r}; such a "
                "device compiles every update as a whole already. Leave compile out."
            )
        if manual:
            raise ConfigurationError(
                "compile=True compiles the steps, and under manual optimization training_step holds backward and the "
                "optimizers' steps. Compile parts of the module in configure_model instead: self.net.compile()."
            )
        step.compiled = {name: torch.compile(getattr(module, name), **compiled) for name in SHORTER}
        step.graphed = device.type == "cuda" and compiled.get("mode") in GRAPHS
        step.plain = False
    context = Context(
        world=world,
        device=device,
        policy=precision.policy,
        scaling=precision.scaling,
        clip=clip,
        accumulate=plan.accumulate or 1,
        manual=manual,
        late=late or manual,
        deterministic=plan.deterministic,
        mesh_dims=strategy.mesh_dims(world.world_size),
        backward=backward,
        same_on_all_ranks=same_on_all_ranks,
        restored=restored,
    )
    root = strategy.shard(step, context) if train or strategy.joint_forward else step
    engine = Engine(module, strategy, accelerator, precision, device, step, root, clip=clip, moves=moves, lazy=lazy)
    if train and configure_optimizers is not None:
        try:
            engine.optimizers, engine.schedules = read_optimizers(configure_optimizers(), module)
            laid = {id(param) for ref in before if (param := ref()) is not None}
            check_optimizers(engine, manual, laid, tells=world.rank == 0)
            for optimizer in engine.optimizers:
                strategy.wrap_optimizer(root, optimizer)
                precision.wrap_optimizer(optimizer)
        except BaseException:
            strategy.teardown(root)  # nobody else has the engine yet
            raise
        if precision.scaling is not None:
            engine.scaler = LossScaler(precision.scaling)
    engine.names = {param: name for name, param in module.named_parameters()}
    return engine


class Backward:
    """The module's backward with its hooks around."""

    def __init__(self, module: Any, hooks: Hooks) -> None:
        self.module, self.before, self.after = module, hooks.on_before_backward, hooks.on_after_backward
        self.options: dict[str, Any] = {}  # of the next call, under manual optimization

    def __call__(self, loss: Tensor) -> None:
        call(self.before, loss)
        options, self.options = self.options, {}
        self.module.backward(loss, **options)
        call(self.after)


def with_hooks(module: Any, hooks: Hooks) -> Callable[[Tensor], None]:
    """The module's backward with its hooks around, or plain ``Tensor.backward`` where nobody overrides anything."""
    plain = type(module).backward.__module__ == "trivet.module" and module.automatic_optimization
    if plain and not hooks.on_before_backward and not hooks.on_after_backward:
        return Tensor.backward
    return Backward(module, hooks)
