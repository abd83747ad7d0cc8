"""Sizes and crc32 checksums of files, counted while they are written, or by reading them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import IO, Any, TypedDict

from .files import Place, force, opened

BLOCK = 1 << 20


class Sum(TypedDict):
    """What the manifest says of a file. Checkpoints written before there were checksums have the size alone."""

    size: int
    crc32: int


class Summing:
    """A binary file to write to, which a second thread sums while the first one writes; zlib and the system's write
    both let go of the interpreter's lock."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trivet-crc32")
        self._sum: Sum = {"size": 0, "crc32": 0}

    @property
    def sum(self) -> Sum:
        return self._sum

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        before = self._sum["crc32"]
        if view.nbytes < BLOCK:
            written = self._file.write(view)
            crc32 = zlib.crc32(view, before)
        else:
            ahead = self._thread.submit(zlib.crc32, view, before)
            try:
                written = self._file.write(view)
            finally:
                crc32 = ahead.result()  # the memory is the caller's again when this returns
        self._sum = {"size": self._sum["size"] + view.nbytes, "crc32": crc32}
        return written

    def tell(self) -> int:
        return self._sum["size"]

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Summing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._thread.shutdown()


def write_summed(path: Place, write: Callable[[Any], object]) -> Sum:
    """Make the file ``path`` with what ``write`` writes to it, and force it to the disk."""
    with opened(path, "xb") as file, Summing(file) as summing:
        write(summing)
        force(summing)
    return summing.sum


def read_sum(path: Place) -> Sum:
    """Count by reading."""
    size = crc32 = 0
    with opened(path, "rb") as file:
        while block := file.read(BLOCK):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
    return {"size": size, "crc32": crc32}
