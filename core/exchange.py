"""The frozen data that plugins and core exchange. Public through `trivet.plugins`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .launch.world import World


@dataclass(frozen=True)
class Policy:
    """Dtypes, chosen by the Precision and read by the Strategy.

    ``param``: storage of parameters and so of optimizer state; ``compute``: matrix products in the forward pass;
    ``reduce``: gradients while they are communicated.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32


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
    1. ``last``: whether gradients have to be complete (reduced) after its backward. ``output``: what the step returned,
    set by `Strategy.forward_backward`.
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
