"""Sizes and crc32 checksums of files, counted while they are written, or by reading them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import IO, Any, TypedDict

from ..errors import CheckpointError
from .files import Place, Remote, force, opened
from .pieces import REMOTE_BLOCK, THREADS, Piece, Stretch, read, stretches

BLOCK = 1 << 20


Read = Callable[[], tuple[int, Exception | None]]


class Sum(TypedDict):
    """What the manifest says of a file. Checkpoints written before there were checksums have the size alone."""

    size: int
    crc32: int


class Summing:
    """A binary file to write to, whose checksum grows meanwhile.

    ``archives``: what is written are archives of ``torch.save``'s. It sums each tensor for its ZIP and says the number
    right behind, so that long blocks need not be summed a second time. Where that is not as expected the sum is
    unknown, and `sum` is None.
    """

    def __init__(self, file: IO[bytes], *, archives: bool = False) -> None:
        self._file = file
        self._archives = archives and _torch_sums()
        self._size = self._crc32 = 0
        self._behind = 0  # of the block before, which is not in the checksum yet
        self._known = True

    @property
    def sum(self) -> Sum | None:
        return Sum(size=self._size, crc32=self._crc32) if self._known and not self._behind else None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = self._file.write(view)
        self._size += view.nbytes
        if self._behind:
            self._take(view)
        if self._archives and view.nbytes >= BLOCK:
            self._behind = view.nbytes
        else:
            self._crc32 = zlib.crc32(view, self._crc32)
        return written

    def _take(self, view: memoryview) -> None:
        """Take the checksum of the block before out of the ZIP's descriptor that follows it."""
        form = {16: "<4sIII", 24: "<4sIQQ"}.get(view.nbytes, "")
        mark, crc32, _, size = struct.unpack(form, view) if form else (b"", 0, 0, 0)
        self._known &= (mark, size) == (b"PK\7\x08", self._behind)
        self._crc32, self._behind = combined(self._crc32, crc32, self._behind), 0

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


def _torch_sums() -> bool:
    import torch

    return bool(torch.serialization.get_crc32_options())


# --------------------------------------------------------------------------------------- the sum of two parts together


def combined(one: int, other: int, size: int) -> int:
    """The crc32 of two pieces of data one behind the other, from that of each and the size of the second.

    To append a zero bit is a linear map of the crc32 over GF(2); zlib's crc32_combine does the same.
    """
    for appended in _zeros():
        if not size:
            break
        if size & 1:
            one = _mapped(appended, one)
        size >>= 1
    return one ^ other


@cache
def _zeros() -> tuple[tuple[int, ...], ...]:
    """The maps that append 1, 2, 4, ... zero bytes, each as the images of the 32 bits."""
    bit = (0xEDB88320, *(1 << n for n in range(31)))
    for _ in range(3):
        bit = tuple(_mapped(bit, image) for image in bit)
    maps = [bit]
    while len(maps) < 48:
        maps.append(tuple(_mapped(maps[-1], image) for image in maps[-1]))
    return tuple(maps)


def _mapped(images: tuple[int, ...], value: int) -> int:
    found = 0
    for image in images:
        if value & 1:
            found ^= image
        value >>= 1
    return found


def write_summed(path: Place, write: Callable[[Any], object]) -> Sum:
    """Make the file ``path`` with what ``write`` writes to it, and force it to the disk."""
    with opened(path, "xb") as file:
        summing = Summing(file)
        write(summing)
        force(summing)
    assert summing.sum is not None
    return summing.sum


def read_sum(path: Place) -> Sum:
    """Count by reading."""
    size = crc32 = 0
    if isinstance(path, Remote):
        while data := path.read_range(size, size + REMOTE_BLOCK):
            size, crc32 = size + len(data), zlib.crc32(data, crc32)
        return {"size": size, "crc32": crc32}
    block = memoryview(bytearray(BLOCK))  # one, so that it stays in the processor's cache
    with open(path, "rb") as file:
        while count := file.readinto(block):
            size, crc32 = size + count, zlib.crc32(block[:count], crc32)
    return {"size": size, "crc32": crc32}


class Checks:
    """Reads files in threads of its own, and compares them with the sums that the manifest lists, each once."""

    def __init__(self, directory: Place, files: Mapping[str, Mapping[str, int]]) -> None:
        self._directory, self._files = directory, files
        self._threads: ThreadPoolExecutor | None = None
        self._summed: set[str] = set()
        self._begun: list[tuple[str, bool, list[tuple[Stretch, Read]]]] = []

    def begin(self, name: str, pieces: Sequence[Piece] = (), *, here: bool = False) -> None:
        """Start to read a file: the whole of it if it has a checksum that it was not compared with yet, else those
        pieces, which take what is theirs in either case. ``here``: in the thread that waits."""
        entry = self._files.get(name, {})
        summed = "crc32" in entry and name not in self._summed
        if not summed and not pieces:
            return
        if summed:
            self._summed.add(name)
        self._threads = self._threads or ThreadPoolExecutor(THREADS, thread_name_prefix="trivet-read")
        parts: list[tuple[Stretch, Read]] = []
        for stretch in stretches(pieces, entry["size"] if summed else None):
            one = partial(read, self._directory / name, stretch, summed=summed)
            parts.append((stretch, one if here else self._threads.submit(one).result))
        self._begun.append((name, summed, parts))

    def wait(self) -> None:
        """Raise `CheckpointError`, naming the file, if one of those that were begun is not what was written; if all
        are, what went wrong in a piece."""
        begun, self._begun = self._begun, []
        errors: list[Exception | None] = []
        for name, summed, parts in begun:
            crc32 = 0
            for stretch, result in parts:
                part, error = result()
                crc32 = combined(crc32, part, stretch.size)
                errors.append(error)
            size = sum(stretch.size for stretch, _ in parts)
            if summed and (text := difference(name, self._files[name], Sum(size=size, crc32=crc32))):
                raise CheckpointError(text)
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


def difference(name: str, stored: Mapping[str, int], found: Sum) -> str:
    """What is wrong with a file that was read, in words; "" where it is as it was written."""
    if found["size"] != stored["size"]:
        return f"{name} has {found['size']} bytes instead of {stored['size']}"
    if found["crc32"] != stored["crc32"]:
        return f"{name} is damaged: its crc32 is {found['crc32']:08x} instead of {stored['crc32']:08x}"
    return ""
