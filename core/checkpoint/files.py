"""Paths on this machine's file systems, and on others through fsspec: ``s3://bucket/run``, ``memory://run``.

A `Remote` has the methods of `pathlib.Path` that checkpoints need, so that most code takes either. What has to differ
(no rename, no lock, nothing to force to a disk) is said in `places`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ConfigurationError


def as_path(path: str | os.PathLike[str]) -> Place:
    """A path of this machine, or a `Remote` where there is a protocol in it."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError(f"{path!r} is no path. Expected a str or a pathlib.Path.")
    text = os.fspath(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return Remote(text) if "://" in text else Path(text)


def place(path: str | os.PathLike[str]) -> Place:
    """`as_path`, absolute."""
    return as_path(path).absolute()


@dataclass(frozen=True)
class Stat:
    """Of a remote file: its size, and when it was changed where the file system says so, else 0."""

    st_size: int
    st_mtime_ns: int


class Remote:
    """A path on a file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        protocol, _, rest = url.partition("://")
        self._url = f"{protocol}://{rest.rstrip('/')}"
        self.fs, self._path = _file_system(self._url)

    def __fspath__(self) -> str:
        return self._url

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"Remote({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and str(other) == self._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: Remote) -> bool:
        return self._url < str(other)

    def __truediv__(self, name: str | os.PathLike[str]) -> Remote:
        return Remote(f"{self._url}/{os.fspath(name)}")

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        return Remote, (self._url,)

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self._url.partition("://")[2])

    @property
    def name(self) -> str:
        return self._pure.name

    @property
    def suffix(self) -> str:
        return self._pure.suffix

    @property
    def parent(self) -> Remote:
        protocol, _, rest = self._url.partition("://")
        return Remote(f"{protocol}://{rest.rpartition('/')[0]}")

    def with_name(self, name: str) -> Remote:
        return self.parent / name

    def absolute(self) -> Remote:
        return self

    def resolve(self) -> Remote:
        return self

    def is_relative_to(self, other: Remote) -> bool:
        return f"{self._url}/".startswith(f"{other!s}/")

    def as_posix(self) -> str:
        return self._url

    def exists(self) -> bool:
        return bool(self.fs.exists(self._url))

    def is_file(self) -> bool:
        return bool(self.fs.isfile(self._url))

    def is_dir(self) -> bool:
        return bool(self.fs.isdir(self._url))

    def stat(self) -> Stat:
        info = self.fs.info(self._url)
        try:
            changed = int(self.fs.modified(self._url).timestamp() * 1e9)
        except (NotImplementedError, KeyError, AttributeError):
            changed = 0
        return Stat(int(info["size"] or 0), changed)

    def iterdir(self) -> Iterator[Remote]:
        own = self._path.rstrip("/")
        for name in (str(name).rstrip("/") for name in self.fs.ls(self._url, detail=False)):
            if name != own:  # object stores may list the directory itself
                yield self / PurePosixPath(name).name

    def rglob(self, pattern: str) -> Iterator[Remote]:
        """All files below, whatever the pattern."""
        own = PurePosixPath(self._path)
        for name in self.fs.find(self._url):
            yield self / PurePosixPath(name).relative_to(own).as_posix()

    def open(self, mode: str = "r", encoding: str | None = None) -> Any:
        return self.fs.open(self._url, mode.replace("x", "w"), **({"encoding": encoding} if encoding else {}))

    def read_bytes(self) -> bytes:
        return bytes(self.fs.cat_file(self._url))

    def read_range(self, start: int, end: int) -> bytes:
        """Those bytes. Not by `open`: of ``memory://`` all that have opened a file share one position in it."""
        if start >= self.stat().st_size:
            return b""
        return bytes(self.fs.cat_file(self._url, start=start, end=end))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = True) -> None:
        self.fs.makedirs(self._url, exist_ok=True)

    def rename(self, target: Remote) -> None:
        self.fs.mv(self._url, str(target))

    def unlink(self, missing_ok: bool = False) -> None:
        if not (missing_ok and not self.exists()):
            self.fs.rm_file(self._url)

    def remove(self) -> None:
        """The directory and all in it."""
        self.fs.rm(self._url, recursive=True)


Place = Path | Remote


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigurationError(
            f"{url!r} needs the package fsspec. Install it with: pip install 'trivet[remote]'"
        ) from error
    try:
        found, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # the protocol's own package is missing, or there is no such protocol
        raise ConfigurationError(f"{url!r}: {error}") from error
    found.invalidate_cache()  # others write there too
    return found, path


def opened(path: Place, mode: str, encoding: str | None = None) -> Any:
    """The built-in ``open``, of either kind of path."""
    return open(path, mode, encoding=encoding) if isinstance(path, Path) else path.open(mode, encoding)


def force(file: Any) -> None:
    """Have what was written to a file lie on the disk, where it is a file of this machine."""
    file.flush()
    try:
        handle = file.fileno()
    except (io.UnsupportedOperation, AttributeError):
        return
    os.fsync(handle)
