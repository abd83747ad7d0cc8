"""Window: what one update is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DataError
from ..plugins import MicroBatch
from ..slot import wide
from .dealing import weight

Weigh = Callable[[Any], float | None]


@dataclass(slots=True)
class Window:
    """The micro-batches of this rank in one update, all of them fetched.

    ``samples``: of all ranks; ``weight``: what the micro-batches' shares (`MicroBatch.samples`) add up to over all
    ranks, which is ``samples`` unless a weighing function rules; ``last``: no window follows in this epoch, known
    before data is read where the loader is read by index, or a limit is reached, and False where it is not known.
    """

    batches: list[MicroBatch]
    samples: float
    weight: float
    last: bool = False


Ahead = Callable[[Window], None]


def behind(position: Mapping[str, Any] | None, epoch: int) -> bool:
    """Whether a position that was loaded is the beginning of the epoch after this one. It was saved while this one was
    being ended, by a validation's hook say, and no window of it is left."""
    return (
        position is not None and position["epoch"] == epoch + 1 and not (position["position"] or position["finished"])
    )


def beyond(position: int, end: int, what: str) -> str:
    """What to say of a position that was loaded and that an epoch does not have."""
    return (
        f"the checkpoint stands at {position} {what} in its epoch, and the epoch has {end} here. Either the checkpoint "
        "is damaged, or it is of other data: give the data that it was written with, or begin anew from its weights."
    )


def weigh_(window: Window, weigh: Weigh, world_size: int) -> None:
    """Weigh the micro-batches by ``weigh(batch)`` instead of by samples. One collective: all ranks call it."""
    for micro in window.batches:
        if micro.samples and (value := weigh(micro.batch)) is not None:
            micro.samples = float(value)
    total = sum(micro.samples for micro in window.batches)
    if world_size > 1:
        total = sum_over_ranks([total])[0]
    reweigh_(window, total, world_size)


def reweigh_(window: Window, total: float, world_size: int) -> None:
    """Set the micro-batches' weights from their shares of ``total``."""
    if not total > 0:
        raise DataError(
            f"the batches {[micro.index for micro in window.batches]!r} of one update weigh {total!r} together; "
            "expected a positive number. Leave such batches out of the data, or let batch_weight return what counts."
        )
    window.weight = total
    for micro in window.batches:
        micro.weight = weight(micro.samples, total, world_size)


def one_ahead(windows: Iterator[tuple[Window, int]], ahead: Ahead) -> Iterator[tuple[Window, int]]:
    """The same windows, ``ahead`` called with the next before each is handed out. What reading it raises is raised in
    its turn."""
    current = next(windows, None)
    while current is not None:
        following, failure = None, None
        try:
            following = next(windows, None)
            if following is not None:
                ahead(following[0])
        except Exception as error:
            failure = error
        yield current
        if failure is not None:
            raise failure
        current = following


def sum_over_ranks(values: list[float]) -> list[float]:
    """Elementwise sum over all ranks. A collective that every rank takes part in; waits for the result."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]  # "cpu:gloo,cuda:nccl"
    device = torch.device("cpu" if "cpu" in devices else devices[0])
    tensor = torch.tensor(values, dtype=wide(device), device=device)
    dist.all_reduce(tensor)
    result: list[float] = tensor.tolist()
    return result
