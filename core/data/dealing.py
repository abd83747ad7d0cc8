"""Dealing one update's global batch into W x k micro-batches. Pure; every rank computes the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any


@dataclass(slots=True)
class Piece:
    """One micro-batch of one rank: its indices, where they begin in the global batch, and its weight.

    ``samples`` is 0 where a rank has no work in this turn; its indices are then borrowed from the window's first batch.
    ``weight`` is ``samples`` * world size / samples of the global batch, and None where that is 1.
    """

    indices: Any
    offset: int
    samples: float
    weight: float | None = None


def windows(batches: Iterator[Any], size: int) -> Iterator[tuple[list[Any], bool]]:
    """Cut a stream of batches into windows of ``size``, the last may be shorter; also say which one is the last.

    The stream is read one window ahead: indices only, no data.
    """
    window = list(islice(batches, size))
    while window:
        following = list(islice(batches, size))
        yield window, not following
        window = following


def micro_batches(batches: int, world_size: int) -> int:
    """How many micro-batches every rank runs for a window of so many user batches."""
    return -(-batches // world_size)


def deal(
    window: Sequence[Any], rank: int, world_size: int, *, prebuilt: bool = False, whole: bool = False
) -> tuple[list[Piece], float]:
    """This rank's micro-batches of a window of the user's batches, and the samples of all ranks.

    Micro-batch ``j`` of rank ``r`` is the user's batch ``j * W + r`` where the batches divide evenly among the ranks.
    Otherwise the window's samples are cut, in order, into equal pieces whose sizes differ by at most one; ``prebuilt``
    batches (each is one index) cannot be cut and stay whole; others do where ``whole`` is set.
    """
    sizes = [prebuilt_size(index) for index in window] if prebuilt else [len(batch) for batch in window]
    total = sum(sizes)
    if world_size == 1 and len(window) == 1:
        return [Piece(window[0], 0, total)], total
    offsets = range(len(window)) if prebuilt else [0, *accumulate(sizes)]
    if prebuilt or whole or len(window) % world_size == 0:
        turns = range(rank, micro_batches(len(window), world_size) * world_size, world_size)
        pieces = [Piece(window[n], offsets[n], sizes[n]) if n < len(window) else Piece(window[0], 0, 0) for n in turns]
    else:
        indices = [index for batch in window for index in batch]
        cuts = _even(total, len(window), rank, world_size)
        pieces = [Piece(indices[start : max(stop, 1)], start, stop - start) for start, stop in cuts]
    for piece in pieces:
        piece.weight = weight(piece.samples, total, world_size)
    return pieces, total


def spans(total: int, batches: int, size: int, offset: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """The same for a window of torch's own batches: where each micro-batch starts and stops among the window's indices.

    The ``total`` indices are so many batches of ``size``; the first began ``offset`` indices before the window, and the
    last may be shorter. A micro-batch without work starts and stops at 0.
    """
    if batches % world_size:
        return _even(total, batches, rank, world_size)
    begins = range(rank * size - offset, batches * size - offset, world_size * size)
    return [(max(begin, 0), min(begin + size, total)) for begin in begins]


def weight(share: float, total: float, world_size: int) -> float | None:
    """The factor of a micro-batch's loss: its share of the update times the number of ranks; None for 1."""
    return None if share * world_size == total else share * world_size / total


def prebuilt_size(index: Any) -> int:
    """The samples of a prebuilt batch: known where its index is a list of indices, counted as 1 otherwise."""
    return len(index) if type(index) is list else 1


def _even(total: int, batches: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    count = micro_batches(batches, world_size) * world_size
    size, larger = divmod(total, count)
    ends = [(n * size + min(n, larger), (n + 1) * size + min(n + 1, larger)) for n in range(rank, count, world_size)]
    return [(start, stop) if stop > start else (0, 0) for start, stop in ends]
