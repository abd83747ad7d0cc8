"""Evaluation where a forward is a collective: a rank whose batches have ended takes part on one that it borrows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any

import torch
import torch.distributed as dist

from ..launch.world import World

# what a rank says before each turn
NOTHING, ENDED, BATCH = 0, 1, 2
STATES = 4


def joint(
    batches: Iterable[tuple[Any, int, float]],
    world: World,
    device: torch.device | None,
    stopping: Callable[[], int] = lambda: 0,
    stopped: Callable[[int], object] = lambda signal: None,
) -> Iterator[tuple[Any, int, float]]:
    """``(batch, batch_idx, samples)`` on all ranks until the last of them has no more; borrowed ones have 0 samples.

    A rank borrows its own last batch, and where it never had one a batch that another rank sends. Before each turn one
    collective of a number per rank, which is read on the host.

    ``stopping`` gives the number of a signal that asks to break off, or 0; with any all end before the same turn, and
    ``stopped`` is called with the lowest rank's.
    """
    mine: tuple[Any, int] | None = None
    stream = iter(batches)
    while True:
        item = next(stream, None)
        state = BATCH if item is not None else NOTHING if mine is None else ENDED
        states = torch.zeros(world.world_size, dtype=torch.int64, device=device)
        states[world.rank] = state + STATES * stopping()
        dist.all_reduce(states)  # all ranks
        everyone = states.tolist()
        if signal := next(filter(None, (value // STATES for value in everyone)), 0):
            stopped(signal)
            return
        if BATCH not in everyone:
            return
        if NOTHING in everyone:
            source = everyone.index(BATCH)
            sent = [(item[0], item[1]) if item is not None and world.rank == source else None]
            dist.broadcast_object_list(sent, source, device=device)  # all ranks
            mine = mine or sent[0]
        if item is not None:
            batch = item[0]
            mine = (copy(batch) if isinstance(batch, (dict, list)) else batch, item[1])  # the step may take it apart
            yield item
        else:
            assert mine is not None
            yield (*mine, 0.0)
