"""What brings the tensors of a checkpoint from its files to where they belong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .archive import Elements, elements
from .contents import load_plain
from .files import Place, Remote
from .index import Entry
from .parts import TENSORS
from .pieces import REMOTE_BLOCK, Fill, Piece, into
from .sums import Checks

LARGE = 1 << 18  # bytes of an archive that is worth to be looked into
RUN = 1 << 20  # of small archives that are read together
GAP = 1 << 16  # between two of them


@dataclass(frozen=True)
class Part:
    """What is wanted of an archive's tensor: the box of ``lengths`` at ``offsets``, in ``target``."""

    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + length) for o, length in zip(self.offsets, self.lengths, strict=True))


@dataclass(frozen=True)
class Archive:
    """A ``torch.save`` of one tensor within a file, and what is wanted of it."""

    start: int
    length: int
    dtype: torch.dtype
    parts: list[Part]

    @property
    def end(self) -> int:
        return self.start + self.length


class Wanted:
    """Parts of stored tensors, to be read together."""

    def __init__(self) -> None:
        self._archives: dict[str, dict[int, Archive]] = {}

    def add(self, file: str, start: int, length: int, dtype: torch.dtype, part: Part) -> None:
        of_file = self._archives.setdefault(file, {})
        of_file.setdefault(start, Archive(start, length, dtype, [])).parts.append(part)

    def add_whole(self, name: str, entry: Entry, target: Tensor) -> None:
        """All chunks of a tensor."""
        for chunk in entry.chunks:
            part = Part(name, (0,) * len(chunk.sizes), chunk.sizes, target.detach())
            if chunk.sizes != entry.shape:
                box = replace(part, offsets=chunk.offsets).box
                part = replace(part, target=part.target[box])
            self.add(chunk.file, chunk.start, chunk.length, getattr(torch, entry.dtype), part)

    def check(self, folder: Place, checks: Checks) -> None:
        """Compare the files with their checksums, and read nothing."""
        for file in sorted(self._archives):
            checks.begin(f"{folder.name}/{file}")
        checks.wait()

    def read(self, folder: Place, checks: Checks) -> None:
        """Other devices are left to this thread, when the files are found to be what was written."""
        for on_cpu in (True, False):
            for file, archives in sorted(self._archives.items()):
                mine = [one for _, one in sorted(archives.items()) if on_cpu is all(p.target.is_cpu for p in one.parts)]
                checks.begin(f"{folder.name}/{file}", list(pieces(folder / file, mine)), here=not on_cpu)
            checks.wait()


def pieces(path: Place, archives: list[Archive]) -> Iterator[Piece]:
    """What to read of a file: of large archives the elements, straight to where they belong; small ones in runs."""
    remote = isinstance(path, Remote)  # each request costs: nothing is looked into
    longest, run = REMOTE_BLOCK if remote else RUN, list[Archive]()
    with nullcontext() if isinstance(path, Remote) else open(path, "rb", buffering=0) as file:
        for archive in archives:
            found = None
            if file is not None and archive.length >= LARGE and len(archive.parts) == 1:
                found = elements(file, archive.start, archive.length, str(archive.dtype).removeprefix("torch."))
            if found is not None and _fits(found.shape, archive.parts[0]):
                yield from _straight(found, archive.dtype, archive.parts[0])
                continue
            if run and (archive.end - run[0].start > longest or archive.start - run[-1].end > GAP):
                yield _together(path.name, run)
                run = []
            run.append(archive)
    if run:
        yield _together(path.name, run)


def _fits(shape: tuple[int, ...], part: Part) -> bool:
    """Whether the part lies within a tensor of this shape, and has the shape of where it is to go."""
    if len(shape) != len(part.lengths) or tuple(part.target.shape) != tuple(part.lengths):
        return False
    within = all(
        offset + length <= size for offset, length, size in zip(part.offsets, part.lengths, shape, strict=True)
    )
    return within and part.target.numel() > 0


def _straight(found: Elements, dtype: torch.dtype, part: Part) -> Iterator[Piece]:
    """The rows that the part is in, into its target, or on the way there where that has another form."""
    rows, rest = part.lengths[0], found.shape[1:]
    row = prod(rest) * dtype.itemsize
    start = found.start + part.offsets[0] * row
    if part.lengths[1:] == rest and part.target.dtype == dtype and (memory := _memory(part.target)) is not None:
        yield from into(memory, start)
        return

    def take(fill: Fill) -> None:
        between = torch.empty((rows, *rest), dtype=dtype)
        memory = _memory(between)
        assert memory is not None
        fill(memory)
        part.target.copy_(between[(slice(None), *part.box[1:])])

    yield Piece(start, rows * row, take)


def _memory(tensor: Tensor) -> memoryview | None:
    """The bytes of the elements of a tensor without gradient, where they lie on the CPU, one behind the other."""
    if type(tensor) is not Tensor or not tensor.is_cpu or not tensor.is_contiguous():
        return None
    return None if tensor.is_conj() or tensor.is_neg() else tensor.view(-1).view(torch.uint8).numpy().data


def _together(file: str, run: list[Archive]) -> Piece:
    """Archives of which torch says what is in them."""
    start, size = run[0].start, run[-1].end - run[0].start

    def take(fill: Fill) -> None:
        data = memoryview(bytearray(size))
        fill(data)
        for archive in run:
            found = load_plain(bytes(data[archive.start - start : archive.end - start]), f"{TENSORS}/{file}")
            for part in archive.parts:
                _copy(found, part, file)

    return Piece(start, size, take)


def _copy(found: Any, part: Part, file: str) -> None:
    if not isinstance(found, Tensor) or found.dim() != len(part.lengths):
        raise CheckpointError(f"{file} holds something else than the part of {part.name!r} that the index says")
    if not _fits(tuple(found.shape), part) and part.target.numel():
        raise CheckpointError(f"{file} holds {tuple(found.shape)} of {part.name!r}, less than the index says")
    part.target.copy_(found[part.box])
