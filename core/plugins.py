"""The three kinds of plugin, and the frozen data that the core carries between them.

A **Strategy** decides where parameters, gradients and optimizer state live and who communicates when. An
**Accelerator** decides which device and which collective backend. A **Precision** decides which dtypes. None of them
knows another: what one must know of another travels as data (`Policy`, `Scaling`, `Context`), what one wants of another
is a capability name in `Needs`. Everything in this file is public interface; `INTERFACE` counts its breaking changes.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import gradients
from .casting import cast_
from .launch.world import World
from .layout import whole
from .losses import loss_in
from .scaling import LossScaler
from .state import OwnState as OwnState
from .trainable import trainable

INTERFACE = 1


# ---------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Policy:
    """Dtypes, chosen by the Precision and read by the Strategy.

    ``param``: storage of parameters; ``compute``: matrix products in the forward pass; ``reduce``: gradients while they
    are communicated; ``state``: what optimizers step, and so their state; None for ``param``. A precision with another
    ``state`` sees to it in `Precision.wrap_optimizer`. ``matmul``: how float32 products are made, as
    `torch.set_float32_matmul_precision` names it, in the whole run; None leaves that alone.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    state: torch.dtype | None = None
    matmul: str | None = None


@dataclass(frozen=True)
class Scaling:
    """Dynamic loss scaling as a Precision wants it; the core carries it out (Micikevicius et al. 2018, section 3.2).

    The loss is multiplied by ``initial``; after ``interval`` updates without overflow the scale is multiplied by
    ``growth``, on overflow by ``backoff`` and the update is skipped.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


@dataclass(frozen=True)
class Clip:
    """Gradient clipping: ``algorithm`` is ``"norm"`` (global L2 norm of all gradients) or ``"value"`` (elementwise)."""

    value: float
    algorithm: str = "norm"


@dataclass(frozen=True)
class Needs:
    """Capability names that a plugin wants the other parties to offer. Plain strings: anybody may coin one."""

    strategy: frozenset[str] = frozenset()
    accelerator: frozenset[str] = frozenset()
    precision: frozenset[str] = frozenset()
    module: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Choice:
    """What was chosen beside a strategy, as far as it is known before launch; see `Strategy.refuses`.

    ``accumulate`` is None where it follows from the data, ``policy`` where the precision is not made yet.
    """

    device_type: str = ""
    policy: Policy | None = None
    clip: Clip | None = None
    accumulate: int | None = None
    on_skip: str | None = None
    world_size: int = 1


@dataclass(frozen=True)
class Context:
    """What `Strategy.shard` is told, once.

    ``mesh_dims`` is what the strategy itself answered before launch; ``mesh()`` builds the DeviceMesh from it (a
    collective: all ranks call it). ``manual`` says that the module steps its optimizers itself. ``late`` says that
    gradients must not be reduced in the backward pass but in `Strategy.reduce_` at the step (manual optimization, or
    batches that may be skipped). ``backward`` is the module's backward with its hooks around it: a strategy calls it
    instead of ``loss.backward()``. ``same_on_all_ranks(what, names)`` raises on every rank when the ranks' lists of
    names differ; it goes through the store, not a collective, so that it cannot hang. ``restored`` says that a
    checkpoint is read into the module right after, so that values which it holds need not be made.
    """

    world: World
    device: torch.device
    policy: Policy = Policy()
    scaling: Scaling | None = None
    clip: Clip | None = None
    accumulate: int = 1
    restored: bool = False
    manual: bool = False
    late: bool = False
    deterministic: bool = False
    mesh_dims: Mapping[str, int] = field(default_factory=dict)
    backward: Callable[[Tensor], None] = Tensor.backward
    same_on_all_ranks: Callable[[str, Sequence[str]], None] = lambda what, names: None

    def mesh(self) -> Any:
        """The `torch.distributed.device_mesh.DeviceMesh` with the strategy's dimensions. Called by all ranks."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, tuple(self.mesh_dims.values()), mesh_dim_names=tuple(self.mesh_dims))


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward inside an update.

    ``weight``: what the loss is multiplied with, this rank's and micro-batch's share of the update times the number of
    ranks, so that the *average* of the ranks' gradients is the gradient of the mean over the update's samples. None is
    1. ``last``: whether gradients have to be complete (reduced) after its backward. ``output``: what the step returned.
    """

    batch: Any
    index: int
    weight: float | Tensor | None = None
    last: bool = True
    samples: float = 0.0
    dataloader_index: int = 0
    output: Any = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: ``applied`` is False after an overflow, ``norm`` is the gradient norm before clipping."""

    applied: bool = True
    norm: Tensor | None = None


APPLIED = StepResult()  # the usual one, made once


# -------------------------------------------------------------------------------------------------------------- plugin


class Plugin(ABC):  # noqa: B024  the kinds below have the abstract methods
    """What all three kinds have in common. Constructor arguments are kept as attributes of the same name."""

    interface: ClassVar[int] = INTERFACE
    reasons: Mapping[str, str] = {}  # by capability name, for refusals: a sentence on why it is lacking or needed

    @property
    def needs(self) -> Needs:
        """What this plugin wants of the others. Called in the launching process: creates no device context."""
        return Needs()

    @property
    def offers(self) -> frozenset[str]:
        """The capability names that this plugin has. Called in the launching process."""
        return frozenset()

    def options(self) -> dict[str, Any]:
        """The constructor's arguments by name, for the Plan and the checkpoint; values that are not plain as repr."""
        values = {name: vars(self)[name] for name in inspect.signature(type(self)).parameters if name in vars(self)}
        return {k: v if isinstance(v, (str, int, float, bool, type(None))) else repr(v) for k, v in values.items()}


class Precision(Plugin):
    """Which dtypes for storage, compute and reduction. Knows nothing of processes, devices or layouts."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The dtypes. Read before launch, printed in the Plan, compared with what happened in the first update."""

    @property
    def scaling(self) -> Scaling | None:
        """Loss scaling that the core shall carry out, or None."""
        return None

    converted: str = ""  # what `convert` did to which layers, where a user should know it

    def convert(self, module: nn.Module) -> nn.Module:
        """Convert the user's module, in place where possible. Called once per process before the strategy shards.

        The module may be on the meta device. The default casts floating parameters and buffers to ``policy.param``.
        """
        cast_(module, self.policy.param)
        return module

    def cast_batch(self, batch: Any) -> Any:
        """Cast a batch before the step sees it. Not called at all where it is not overridden."""
        return batch

    def forward_context(self, device_type: str) -> AbstractContextManager[Any] | None:
        """A context that is entered around every step, or None. Called once, before `convert`."""
        return None

    def wrap_optimizer(self, optimizer: Optimizer) -> None:
        """Adapt how an optimizer steps, in place, by its step hooks. Called once for each, after the strategy's.

        Within ``step`` parameters and gradients are what this rank steps: plain, slices of them, or `DTensor`s. A
        precision that overrides it says so: ``"user_optimizer"`` is in its ``needs.strategy``.
        """


class Accelerator(Plugin):
    """Which device and which collective backend. Knows nothing of layouts, dtypes or modules.

    ``device_type``, ``collective_backend``, `is_available`, `device_count` and ``offers`` run in the launching process
    and must not create a device context. The rest runs in the process that trains."""

    device_type: ClassVar[str]
    collective_backend: ClassVar[str | None]
    moves_batches: ClassVar[bool] = True
    wanted: frozenset[str] = frozenset()  # the capability names that a run's other plugins need; set before `setup`
    ahead: Callable[[Any, torch.device], Callable[[], Any]] | None = None  # begins to move a batch; then gives it

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine has such a device, with the software to use it."""

    @abstractmethod
    def device_count(self) -> int:
        """How many processes can have a device of their own here. For a CPU: the number of cores."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of the process with this local rank."""

    def unavailable_reason(self) -> str:
        """Why `is_available` said no, for the refusal."""
        return f"no {self.device_type} device was found on this machine"

    def setup(self, device: torch.device) -> None:
        """Make the device current. Called once in each process that trains, before anything is placed."""

    def teardown(self) -> None:
        """Release what `setup` took. Called once, also after an exception."""

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Move every tensor in a batch to the device. Not called where batches are there already (the CPU)."""
        from .data.transfer import to_device

        return to_device(batch, device)

    def seed(self, seed: int) -> None:
        """Seed the device's random generator, before each update; the CPU's generators are the core's."""

    def synchronize(self) -> None:
        """Wait for what was asked of the device. Called around measurements, and before ranks agree to stop."""

    def step_boundary(self) -> None:
        """Called, where it is overridden, after each update and each evaluated batch; a lazy device cuts its graph."""

    def memory(self) -> dict[str, int]:
        """Bytes in use by this process: keys such as ``allocated`` and ``peak``."""
        return {}

    def stats(self) -> dict[str, float]:
        """Utilisation and the like, as floats with the unit in the key (``utilization_percent``)."""
        return {}


class Strategy(Plugin):
    """Where parameters, gradients and optimizer state live, and who communicates when.

    The defaults are a complete data-parallel strategy: every rank holds everything, starts from rank 0's parameters
    and averages gradients in one collective at the step. A plugin overrides the small pieces (`no_sync`, `reduce_`,
    `clip_`, ...) first, and the two verbs `forward_backward` and `optimizer_step` only where it owns the whole step.
    All methods run on all ranks, in the same order, unless their docstring says otherwise.
    """

    context: Context
    joint_forward: bool = False  # whether evaluating is a collective, which a rank without a batch joins on another's
    own_wire: bool = False  # whether gradients travel in a form of its own, whatever the policy's ``reduce`` says
    # whether layers are built without memory (``configure_model`` on the meta device), for `shard` to materialise
    meta: bool = False
    laid_out: str = ""  # what `shard` did, where a user should know it

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"collectives"}))

    @property
    def offers(self) -> frozenset[str]:
        """What a data-parallel strategy can do; `combination` says what each name means."""
        names = "several_processes loss_scaling accumulation clipping manual_optimization skip_samples"
        names += " unused_parameters user_optimizer replaced_layers whole_parameters"
        return frozenset(names.split())

    def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
        """What a user should know before launch: sentences for the Plan."""
        return ()

    def refuses(self, choice: Choice) -> Iterable[tuple[str, str]]:
        """What this strategy cannot do of what was chosen beside it and no capability name says. Pure; before launch.

        Pairs of an axis to change (``"precision"``, ``"clip"``, ``"accumulate"``, ``"on_skip"``, ``"devices"``,
        ``"strategy"``) and a sentence.
        """
        return ()

    def state_dtype(self, policy: Policy) -> torch.dtype:
        """The dtype of what optimizers step, and so of their state: the policy's, unless the strategy keeps a copy of
        its own. Pure; before launch."""
        return policy.state or policy.param

    def mesh_dims(self, world_size: int) -> dict[str, int]:
        """Names and sizes of the mesh dimensions, their product being the world size. Pure; called before launch."""
        return {"dp": world_size}

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        """Lay out ``root`` (a StepModule whose forward is the user's step) and return the module to call in training.

        Called once, on all ranks, after the precision's conversion and before the optimizers are made.
        """
        self.context = replace(context, late=True)
        self.trainable = {param for param in root.parameters() if param.requires_grad}
        gradients.broadcast_(root, context.world)
        return root

    def forward_backward(self, root: nn.Module, batches: Iterable[MicroBatch], scale: float | None) -> None:
        """Run forward and backward of all micro-batches of one update; gradients are complete afterwards.

        ``root`` is what `shard` returned; ``scale`` the loss scale or None. Sets ``output`` of each micro-batch. Under
        manual optimization the step itself calls backward and the optimizers.
        """
        late = self.context.late
        for micro in batches:
            if micro.last and not late:
                self.one_batch(root, micro, scale)
                continue
            with self.no_sync(root):
                self.one_batch(root, micro, scale)

    def one_batch(self, root: nn.Module, micro: MicroBatch, scale: float | None) -> None:
        """Forward and, under automatic optimization, backward of one micro-batch."""
        micro.output = root("training_step", micro.batch, micro.index)
        if not self.context.manual and (loss := self.loss_of(micro, scale)) is not None:
            self.backward(root, loss)

    def loss_of(self, micro: MicroBatch, scale: float | None) -> Tensor | None:
        """The weighted and scaled loss in a step's output; None, and ``output`` set to None, where it is skipped."""
        output = micro.output
        loss = output if isinstance(output, Tensor) or output is None else loss_in(output)
        if loss is None:
            micro.output = None
            return None
        if micro.weight is not None:
            loss = loss * micro.weight
        return loss if scale is None else loss * scale

    def optimizer_step(
        self,
        root: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        clip: Clip | None,
        scaler: LossScaler | None,
        before_step: Callable[[Optimizer], None] | None = None,
    ) -> StepResult:
        """Reduce, unscale, check agreed by all ranks, clip by the global norm, step: in this order.

        ``before_step`` is the user's hook, called with unscaled gradients before they are clipped.
        """
        if self.context.late:
            self.reduce_(gradients.parameters(optimizers))
        if scaler is not None and not scaler.unscale_(gradients.of(optimizers), agree=self.agree_):
            for optimizer in optimizers:
                optimizer.zero_grad()
            return StepResult(applied=False)
        if before_step is not None:
            for optimizer in optimizers:
                before_step(optimizer)
        norm = None
        if clip is not None:
            norm = self.clip_(gradients.parameters(optimizers), clip)
        for optimizer in optimizers:
            optimizer.step()
        return APPLIED if norm is None else StepResult(norm=norm)

    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward does not communicate."""
        return nullcontext()

    def backward(self, root: nn.Module, loss: Tensor) -> None:
        """Backward of one weighted and scaled loss."""
        self.context.backward(loss)

    def reduce_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the gradients of these parameters over all ranks, in place.

        Called at the step where ``context.late`` is set. A parameter without gradient on all ranks stays without.
        """
        gradients.average_(parameters, self.context.world, self.context.policy.reduce)

    def agree_(self, flag: Tensor) -> Tensor:
        """The maximum of a 0-dim tensor over all ranks, in place."""
        return gradients.maximum_(flag, self.context.world)

    def clip_(self, parameters: Sequence[nn.Parameter], clip: Clip) -> Tensor | None:
        """Clip in place and return the global L2 norm before clipping (None when clipping by value)."""
        return gradients.clip_(parameters, clip.value, clip.algorithm)

    def evaluate(self, root: nn.Module) -> nn.Module:
        """The module to call in validation, test and predict: the StepModule itself where forward needs no wrapper."""
        return self.unwrap(root)

    def unwrap(self, root: nn.Module) -> nn.Module:
        """The StepModule inside what `shard` returned."""
        return root

    def refresh(self, root: nn.Module) -> nn.Module:
        """Notice parameters that were frozen, unfrozen or added since the last update; return the module to call.

        Called at every update boundary on all ranks. Must not communicate unless something changed (see `changed`).
        """
        self.changed(root)
        return root

    trainable: set[nn.Parameter] | None = None

    def changed(self, root: nn.Module) -> bool:
        """Whether parameters were frozen, unfrozen or added since the last call, alike on all ranks.

        A `shard` that builds on which parameters require gradients sets ``trainable`` to them. Only where something
        changed here are the other ranks asked, through the store. Raises, naming the parameters, if they differ."""
        before, self.trainable = self.trainable, trainable(root, self.trainable, self.unwrap)
        if before is None or before is self.trainable or before == self.trainable:
            return False
        odd, named = before ^ self.trainable, self.unwrap(root).named_parameters()
        names = [name.removeprefix("module.") for name, param in named if param in odd]
        self.context.same_on_all_ranks("parameters were frozen, unfrozen or added", names)
        return True

    def wrap_optimizer(self, root: nn.Module, optimizer: Optimizer) -> None:
        """Adapt an optimizer in place, keeping its identity and its ``param_groups`` list. Raises if it has state."""

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """Clear the gradients of an optimizer, also those that are reduced already. `Runtime` calls it."""
        optimizer.zero_grad(set_to_none)

    def from_optimizer(self, optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
        """A value of an optimizer's state (or, with the key ``"grad"``, a gradient at the step) for a checkpoint.

        A tensor that belongs to the elements of ``param`` comes back in that parameter's whole shape, plain or as a
        DTensor; anything else as it is. All ranks call it, in the same order.
        """
        return value

    def to_optimizer(self, optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
        """The reverse of `from_optimizer`: what this rank's optimizer keeps of a value that a checkpoint held."""
        return value

    def whole(self, tensor: Tensor) -> Tensor:
        """A tensor of `state_dict` as a plain one. All ranks call it, tensor by tensor in the same order."""
        return whole(tensor)

    @contextmanager
    def full_parameters(self, module: nn.Module, writeback: bool) -> Iterator[None]:
        """A context in which the module's parameters are whole on every rank; see `Trainer.full_parameters`."""
        yield
        if writeback:
            gradients.broadcast_(module, self.context.world)

    def storage_device(self, device: torch.device) -> torch.device:
        """Where parameters are between updates: the run's device, unless they are offloaded."""
        return device

    def state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """The tensors of the user's module by the user's names: plain, or DTensors where they are sharded."""
        return module.state_dict()

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """The reverse of `state_dict`."""
        module.load_state_dict(state, strict=strict)

    synchronises_every: int = 1  # updates from one after which all ranks hold the same weights to the next

    def own_state(self, root: nn.Module) -> OwnState:
        """What else a checkpoint has to hold so that training goes on as if it had not stopped. All ranks call it."""
        return OwnState()

    def load_own_state(self, root: nn.Module, state: OwnState) -> None:
        """The reverse of `own_state`, called with what any strategy stored, or nothing, after weights and optimizers.

        The default has no use for it and says so."""
        if state.alike or state.apart:
            found = sorted({name.partition("/")[0] for name in (*state.alike, *state.apart)})
            text = f"the checkpoint holds {', '.join(found)} of the strategy that wrote it, which this one cannot read"
            warnings.warn(f"{text}: training goes on from weights and optimizer state.", stacklevel=2)

    # the name of a folder inside each checkpoint that only this strategy writes and reads and that holds the optimizer
    # state; None where the core stores it by parameter name, for any strategy to read
    own_folder: str | None = None

    def save_own(self, root: nn.Module, folder: Path) -> None:
        """Write ``own_folder``, which does not exist yet. All ranks call it; it returns when all have written."""

    def load_own(self, root: nn.Module, folder: Path) -> None:
        """Read ``own_folder``, weights and optimizer state. All ranks call it. Raises CheckpointError."""

    def finish(self, root: nn.Module) -> None:
        """Make alike what ranks hold apart. Called on all ranks after a fit that ended well, after the last checkpoint
        was written and before weights are returned."""

    def release(self, root: nn.Module) -> None:
        """Leave the user's module whole and plain, so that it can be used after the run.

        Called on all ranks after a run that ended well, where this process goes on.
        """

    def teardown(self, root: nn.Module) -> None:
        """Called once at the end, also after an exception; must not communicate."""
