"""Decisions of rank 0 that all ranks follow, its errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import CheckpointError, TrivetError

T = TypeVar("T")


def agreed(function: Callable[[], T], *, rank: int, world_size: int) -> T:
    """What ``function`` returns on rank 0, the only rank that calls it; an exception there is raised on all ranks.

    With more than one process a collective: all ranks call it. The value must pickle. Errors of Trivet keep their type,
    the others become `CheckpointError`.
    """
    if world_size == 1:
        return _attempt(function)
    import torch.distributed as dist

    outcome: list[tuple[T | None, TrivetError | None]] = [(None, None)]
    if rank == 0:
        try:
            outcome = [(_attempt(function), None)]
        except TrivetError as error:
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # None only where T allows it


def _attempt(function: Callable[[], T]) -> T:
    try:
        return function()
    except TrivetError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
