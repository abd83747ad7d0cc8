"""Parts of a file brought to where they belong, and its checksum on the way: each byte is read once."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import CheckpointError
from .files import Place, Remote

BLOCK = 1 << 20  # stays in the processor's cache until it is summed
REMOTE_BLOCK = 16 << 20
THREADS = min(4, os.cpu_count() or 1)
ALONE = 16 << 20  # what one thread reads is not shared out
Fill = Callable[[memoryview], None]


@dataclass(frozen=True)
class Piece:
    """``size`` bytes of a file from ``start`` on. ``take`` is called when it is their turn, in one of several threads,
    with a function that fills as much memory with the next of them."""

    start: int
    size: int
    take: Callable[[Fill], object]

    @property
    def end(self) -> int:
        return self.start + self.size


def into(memory: memoryview, start: int) -> Iterator[Piece]:
    """Pieces that fill ``memory`` with what begins at ``start``."""
    for begin in range(0, len(memory), ALONE):
        part = memory[begin : begin + ALONE]
        yield Piece(start + begin, len(part), partial(_fill, part))


def _fill(part: memoryview, fill: Fill) -> None:
    fill(part)


@dataclass(frozen=True)
class Stretch:
    """What one thread reads of a file, in one go."""

    start: int
    end: int
    pieces: Sequence[Piece]

    @property
    def size(self) -> int:
        return self.end - self.start


def stretches(pieces: Sequence[Piece], size: int | None) -> list[Stretch]:
    """A file of ``size`` bytes in stretches of much the same size; without a size no more than the pieces of it."""
    pieces = sorted(pieces, key=lambda piece: piece.start)
    begin, end = (0, size) if size is not None else (pieces[0].start, pieces[-1].end) if pieces else (0, 0)
    count = max(1, min(THREADS, (end - begin) // ALONE))
    found, at, first = [], begin, 0
    for number in range(1, count + 1):
        cut, last = begin + (end - begin) * number // count, first
        while last < len(pieces) and pieces[last].start < cut:
            last += 1
        cut = max(at, cut, pieces[last - 1].end if last else 0)
        found.append(Stretch(at, cut, pieces[first:last]))
        at, first = cut, last
    return found


def read(path: Place, stretch: Stretch, *, summed: bool) -> tuple[int, Exception | None]:
    """Let each piece take what is its own. The crc32 of the stretch, or 0 if it is not ``summed``; and the error of a
    piece, which does not keep the sum from being counted."""
    error: Exception | None = None
    source = _Source(path, stretch.start, summed)
    with source.file:
        for piece in stretch.pieces:
            source.skip(piece.start)
            try:
                if error is None:
                    piece.take(source.fill)
            except Exception as raised:
                error = raised
            source.skip(piece.end)
        source.skip(stretch.end)
    return source.crc32, error


class _Source:
    """A file that is read from front to back."""

    def __init__(self, path: Place, at: int, summed: bool) -> None:
        self.path, self.at, self.summed, self.crc32 = path, at, summed, 0
        self.file: Any = nullcontext() if isinstance(path, Remote) else open(path, "rb", buffering=0)  # noqa: SIM115
        self.block = REMOTE_BLOCK if isinstance(path, Remote) else BLOCK
        self.scratch: memoryview | None = None

    def fill(self, memory: memoryview) -> None:
        for begin in range(0, len(memory), self.block):
            part = memory[begin : begin + self.block]
            self._read(part)
            self.at += len(part)
            if self.summed:
                self.crc32 = zlib.crc32(part, self.crc32)

    def skip(self, to: int) -> None:
        if self.summed:
            self.scratch = self.scratch or memoryview(bytearray(self.block))
            while self.at < to:
                self.fill(self.scratch[: to - self.at])
        self.at = to

    def _read(self, part: memoryview) -> None:
        if isinstance(self.path, Remote):
            data = self.path.read_range(self.at, self.at + len(part))
            count = len(data)
            part[:count] = data
        else:
            count = 0
            self.file.seek(self.at)
            while count < len(part) and (more := self.file.readinto(part[count:])):
                count += more
        if count < len(part):
            raise CheckpointError(f"{self.path.name} ends after {self.at + count} bytes, while it is read")
