"""Which complete checkpoint of some directories is the newest, and which the best."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..errors import CheckpointError
from . import manifest as manifests
from .files import Place
from .places import sweep


@dataclass(frozen=True)
class Found:
    """A complete checkpoint and its manifest."""

    path: Place
    manifest: dict[str, Any]

    @property
    def created(self) -> float:
        """When it was written, in seconds; 0 where its manifest does not say."""
        try:
            return datetime.fromisoformat(self.manifest["created"]).timestamp()
        except (KeyError, TypeError, ValueError):
            return 0.0

    @property
    def boundary(self) -> tuple[int, int]:
        """Where it stands: updates tried, and epochs completed."""
        progress = self.manifest["progress"]
        return int(progress.get("update", 0)) + int(progress.get("skipped", 0)), int(progress.get("epoch", 0))


def complete(directories: Iterable[Place], *, since: float = 0.0) -> list[Found]:
    """The complete checkpoints that lie in these directories, oldest first.

    Sweeps first: a save that a kill cut short is undone, or finished where only its rename was missing. Called by one
    process. ``since`` leaves out those that were created before that second.
    """
    found = []
    for directory in directories:
        if not directory.is_dir():
            continue
        sweep(directory)
        for path in directory.iterdir():
            if path.name.startswith(".") or not (path / manifests.NAME).is_file():
                continue
            try:
                values = manifests.read(path)
                manifests.check_files(path, values)
            except CheckpointError:  # a part of it was deleted by hand, say
                continue
            found.append(Found(path.absolute(), values))
    return sorted((one for one in found if one.created >= int(since)), key=_age)


def _age(found: Found) -> tuple[float, tuple[int, int], int, str]:
    # The manifest's time, since copying changes a file's; it counts seconds, within which progress only grows.
    return found.created, found.boundary, (found.path / manifests.NAME).stat().st_mtime_ns, found.path.name


def newest(directories: Iterable[Place], *, since: float = 0.0) -> Found | None:
    """The newest of `complete`, if there is any."""
    return next(reversed(complete(directories, since=since)), None)


def best(directory: Place, monitor: str | None, mode: str) -> Found | None:
    """The one whose ``monitor`` is best, as the `Checkpoint` that wrote them ranks them; the newest without one."""
    found = complete([directory])
    if monitor is None:
        return found[-1] if found else None
    sign = 1.0 if mode == "min" else -1.0
    ranked = [one for one in found if not math.isnan(one.manifest["metrics"].get(monitor, math.nan))]
    return min(ranked, key=lambda one: sign * one.manifest["metrics"][monitor], default=None)  # of equals the earlier
