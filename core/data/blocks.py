"""The indices of torch's samplers in blocks, out of which batches are cut without going over the indices between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

_OVER_LIST: type = type(iter([]))
_OVER: tuple[type, ...] = (_OVER_LIST, type(iter(())), type(iter(range(0))))
_AHEAD = 2**10  # indices that are read at a time of an iterator that goes over nothing


@dataclass(frozen=True, slots=True)
class Blocks:
    """The indices of a sampler, and how torch makes batches of them: of ``size`` each, with the last one or without.

    A block is the list or the range that the sampler's iterator goes over, as those of torch's samplers do: there an
    index that nobody asks for costs nothing, and random numbers are drawn when the first index of a block is asked for,
    as where all are taken in turn. Of an iterator that goes over none a block is what is read at a time.
    """

    sampler: Iterable[Any]
    size: int
    drop_last: bool

    def __iter__(self) -> Iterator[Sequence[Any]]:
        iterator: Any = iter(self.sampler)
        if type(iterator) in _OVER:
            yield iterator.__reduce__()[1][0]  # what a copy of the iterator would go over
            return
        ahead = max(self.size, _AHEAD - _AHEAD % self.size)
        for first in iterator:
            inner: Any = getattr(iterator, "gi_yieldfrom", None)  # what a generator goes over by "yield from"
            if type(inner) is _OVER_LIST and (state := inner.__reduce__())[2] == 1:
                block = state[1][0]
                iterator.gi_yieldfrom.__setstate__(len(block))  # the generator goes on behind it
                yield block
            else:
                yield [first, *islice(iterator, ahead - 1)]

    def batches(self) -> Iterator[list[Any]]:
        """What torch's BatchSampler gives."""
        size = self.size
        rest: list[Any] = []
        for block in self:
            begin = 0
            if rest:
                begin = size - len(rest)
                rest += block[:begin]
                if len(rest) < size:
                    continue
                yield rest
            end = len(block) - (len(block) - begin) % size
            for start in range(begin, end, size):
                yield [*block[start : start + size]]
            rest = [*block[end:]]
        if rest and not self.drop_last:
            yield rest


class Cut:
    """Goes over blocks, cutting off so many indices at a time."""

    __slots__ = ("_at", "_block", "_blocks")

    def __init__(self, blocks: Iterator[Sequence[Any]]) -> None:
        self._blocks, self._at = blocks, 0
        self._block: Sequence[Any] = ()

    def next(self, count: int) -> tuple[Sequence[Any], int, int]:
        """Where the next ``count`` indices are, or as many as are left: in which sequence, from where, up to where."""
        block, begin = self._block, self._at
        if count and begin == len(block):
            block = self._block = next(self._blocks, ())
            begin = 0
        end = begin + count
        if end <= len(block):
            self._at = end
            return block, begin, end
        found, part = list(block[begin:]), block[:0]
        while block and len(found) < count:
            block = next(self._blocks, ())
            part = block[: count - len(found)]
            found.extend(part)
        self._block, self._at = block, len(part)
        return found, 0, len(found)

    def skip(self, count: int) -> int:
        """Leave out ``count`` indices, or as many as are left: how many that were."""
        rest = count
        while rest > (here := len(self._block) - self._at):
            rest -= here
            self._block, self._at = next(self._blocks, ()), 0
            if not self._block:
                return count - rest
        self._at += rest
        return count
