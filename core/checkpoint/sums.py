"""Sizes and crc32 checksums of files, counted while they are written, or by reading them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import IO, Any, TypedDict

from ..errors import CheckpointError
from .files import Place, Remote, force, opened

BLOCK = 1 << 20
REMOTE_BLOCK = 16 << 20


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
    """Compares files with the sums that the manifest lists, each once, in threads of its own."""

    def __init__(self, directory: Place, files: Mapping[str, Mapping[str, int]]) -> None:
        self._directory, self._files = directory, files
        self._threads: ThreadPoolExecutor | None = None
        self._found: dict[str, Future[Sum]] = {}

    def begin(self, names: Iterable[str]) -> None:
        """Start to read those that are not read yet. One that has no checksum is not checked."""
        self._threads = self._threads or ThreadPoolExecutor(thread_name_prefix="trivet-crc32")
        for name in sorted(names):
            if name not in self._found and "crc32" in self._files.get(name, {}):
                self._found[name] = self._threads.submit(read_sum, self._directory / name)

    def wait(self) -> None:
        """Raise `CheckpointError`, naming the file, if one of those that were begun is not what was written."""
        for name, found in self._found.items():
            if text := difference(name, self._files[name], found.result()):
                raise CheckpointError(text)

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
