"""Whether a tensor is sharded, asked without importing DTensor: a run on one process never loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Sharded(Protocol):
    """What we use of `torch.distributed.tensor.DTensor`."""

    @property
    def device_mesh(self) -> Any: ...

    @property
    def placements(self) -> Sequence[Any]: ...

    def to_local(self) -> Tensor: ...

    def full_tensor(self) -> Tensor: ...


def sharded(tensor: Tensor) -> Sharded | None:
    """The tensor, if it has a mesh and placements; None for a plain one."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return None  # nearly always, and much cheaper than asking the protocol
    return tensor if isinstance(tensor, Sharded) else None


def whole(tensor: Tensor) -> Tensor:
    """The tensor as a plain one. A collective where it is sharded: all ranks call it."""
    found = sharded(tensor)
    return tensor if found is None else found.full_tensor()


def addressable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy on the CPU of one whose memory has no address that could be read from: a lazy device's."""
    lazy = type(tensor) is Tensor and not tensor.data_ptr() and tensor.numel() and not tensor.is_meta
    return tensor.cpu() if lazy else tensor


def distribute(tensor: Tensor, like: Sharded) -> Tensor:
    """A whole tensor that all ranks hold, laid out as another one is. No collective."""
    from torch.distributed.tensor import distribute_tensor

    local = tensor.to(like.to_local().device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
