"""Temporary directories, renames and deletions: what makes a checkpoint appear and vanish as a whole."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError
from . import manifest as manifests
from . import remote
from .files import Place, Remote, as_path

try:
    import fcntl
except ImportError:  # Windows: a save of another live process is then not recognised by `sweep`
    fcntl = None  # type: ignore[assignment]

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<token>[0-9a-f]{12})")


def left_over(directory: Place) -> bool:
    """Whether a directory is one of a save that is going on, or was cut short."""
    if isinstance(directory, Remote):
        return remote.left_over(directory)
    return _HIDDEN.fullmatch(directory.name) is not None


def begin(target: Place) -> Place:
    """Make the temporary directory in which a checkpoint named ``target`` grows. Refuses to replace anything else."""
    if isinstance(target, Remote):
        return remote.begin(target)
    if target.exists() and not (target.is_dir() and (_is_checkpoint(target) or not any(target.iterdir()))):
        raise CheckpointError("something of this name exists that is no checkpoint; choose another name or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(target, "tmp", secrets.token_hex(6))
    temporary.mkdir()
    return temporary


def probe(directory: Place) -> None:
    """Raise OSError if nothing can be made in ``directory`` or, where it does not exist yet, in its nearest parent."""
    if isinstance(directory, Remote):
        return  # whose rights are the file system's to tell, at the first save
    place = directory
    while not place.exists():
        place = place.parent
    trial = _beside(place / "probe", "tmp", secrets.token_hex(6))
    trial.mkdir()
    trial.rmdir()


def taken(path: Place) -> bool:
    """Whether something has this name, or a save is under way that will."""
    if isinstance(path, Remote):
        return path.exists()
    prefix = f".{path.name}.tmp-"
    return path.exists() or (path.parent.is_dir() and any(p.name.startswith(prefix) for p in path.parent.iterdir()))


def publish(temporary: Place, target: Place) -> None:
    """Give the complete checkpoint ``temporary`` its name. A kill between two renames is repaired by `sweep`."""
    if isinstance(temporary, Remote) or isinstance(target, Remote):
        assert isinstance(target, Remote)
        remote.publish(target)
        return
    old = None
    if target.exists():
        match = _HIDDEN.fullmatch(temporary.name)
        assert match is not None
        old = _beside(target, "old", match["token"])
        os.rename(target, old)
    try:
        os.rename(temporary, target)
    except OSError:
        if old is not None:
            os.rename(old, target)
        raise
    sync_directory(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def delete(path: Place) -> None:
    """Remove a checkpoint as a whole: it loses its name first, so that no reader meets a half of it."""
    if isinstance(path, Remote):
        remote.delete(path)
        return
    doomed = _beside(path, "tmp", secrets.token_hex(6))
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def discard(temporary: Place) -> None:
    """Remove what will never be a checkpoint, as far as that can be done; one that is complete stays."""
    if isinstance(temporary, Remote):
        with suppress(OSError):
            if remote.left_over(temporary):
                remote.delete(temporary)
    else:
        shutil.rmtree(temporary, ignore_errors=True)


def sweep(directory: str | os.PathLike[str]) -> Sequence[Place]:
    """Remove what dead saves left in ``directory`` and finish renames that a kill cut short; returns what was removed.

    Called by one rank, before the first save. The temporary directory of a save that another process is still writing
    is locked, and left alone.
    """
    removed: list[Place] = []
    place = as_path(directory)
    if isinstance(place, Remote):
        return remote.sweep(place)
    hidden = [(path, match) for path in sorted(place.glob(".*")) if (match := _HIDDEN.fullmatch(path.name))]
    for path, match in hidden:
        if match["kind"] == "old" and not (target := place / match["name"]).exists():
            new = _beside(target, "tmp", match["token"])
            if new.exists() and _is_locked(new):
                continue  # a live process is between its two renames
            os.rename(new if _is_checkpoint(new) else path, target)
    for path, _ in hidden:
        if path.is_dir() and not _is_locked(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


@contextmanager
def locked(directory: Place, yes: bool) -> Iterator[None]:
    """Hold the lock that says that a live process is writing ``directory``; the kernel releases it when that dies."""
    handle = None
    if yes and fcntl is not None and isinstance(directory, Path):
        with suppress(
            OSError
        ):  # the other ranks are about to meet in a collective; writing itself will say what is wrong
            handle = os.open(directory, os.O_RDONLY)
            _lock(handle)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def sync_directory(directory: Place) -> None:
    """Force the entries of a directory to the disk, where the system can do that."""
    if os.name == "nt" or isinstance(directory, Remote):
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(target: Path, kind: str, token: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{token}")


def _is_checkpoint(directory: Path) -> bool:
    try:
        manifests.read(directory)
    except CheckpointError:
        return False
    return True


def _is_locked(directory: Path) -> bool:
    if fcntl is None:
        return False
    handle = os.open(directory, os.O_RDONLY)
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks (some network ones) says so: nothing is then known to be locked.
        return not isinstance(error, BlockingIOError)
    return True
