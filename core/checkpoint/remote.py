"""What makes a checkpoint appear and vanish where nothing can be renamed: the manifest, written last and removed first.

A save writes into the directory of the checkpoint's own name, beginning with a marker that says which process it is. A
directory with a marker and without a manifest is a save under way, or one whose process died.
"""

from __future__ import annotations

import json
import os
import socket
import time

from ..errors import CheckpointError
from ..processes import is_running
from . import manifest as manifests
from .files import Remote

OLD_S = 24 * 3600.0
"""After how long a save of another machine is taken to be dead."""


def begin(target: Remote) -> Remote:
    """Mark the directory as one that is being written. Refuses a name that exists, since nothing can be replaced."""
    if target.exists():
        raise CheckpointError(
            "something of this name exists, and on a remote file system nothing can be replaced in one step; choose "
            "another name or remove it"
        )
    mark = {"host": socket.gethostname(), "process": os.getpid(), "time": time.time()}
    target.mkdir()
    with (target / manifests.MARKER).open("w") as file:
        json.dump(mark, file)
    return target


def publish(target: Remote) -> None:
    """The manifest is there: the checkpoint is complete."""
    (target / manifests.MARKER).unlink(missing_ok=True)


def delete(target: Remote) -> None:
    """Without its manifest it is no checkpoint any more."""
    (target / manifests.NAME).unlink(missing_ok=True)
    target.remove()


def left_over(directory: Remote) -> bool:
    """Whether a save into it is going on, or was cut short."""
    return (directory / manifests.MARKER).exists() and not (directory / manifests.NAME).exists()


def sweep(place: Remote) -> list[Remote]:
    """Remove what dead saves left in ``place``; see `places.sweep`."""
    removed = []
    for directory in place.iterdir() if place.is_dir() else ():
        if directory.is_dir() and left_over(directory) and _is_dead(directory):
            directory.remove()
            removed.append(directory)
    return removed


def _is_dead(directory: Remote) -> bool:
    try:
        mark = json.loads((directory / manifests.MARKER).read_text())
        if time.time() - float(mark["time"]) > OLD_S:
            return True
        return mark["host"] == socket.gethostname() and os.name == "posix" and not is_running(int(mark["process"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False  # it is just being written, or is somebody else's
