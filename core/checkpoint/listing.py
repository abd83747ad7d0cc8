"""The checkpoints below a directory: which are complete, which is the last and which the best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError
from . import manifest as manifests
from .contents import read_state
from .files import Place
from .places import left_over

POINTER = "last.json"  # what `callbacks.keeping` writes beside its checkpoints


@dataclass
class Found:
    """A checkpoint, or what should have become one. ``problems`` is empty where it is complete."""

    path: Place
    manifest: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """In bytes, by the manifest."""
        return sum(entry["size"] for entry in self.manifest["files"].values()) if self.manifest else 0


def find(directory: Place) -> list[Found]:
    """All checkpoints below ``directory``, itself included, the newest last; raises `CheckpointError`."""
    if not directory.is_dir():
        raise CheckpointError(f"{str(directory)!r} is no directory")
    found = list(_walk(directory))
    found.sort(key=lambda one: (one.manifest["created"], _updates(one), str(one.path)) if one.manifest else ("",))
    for place in {one.path.parent for one in found}:
        _mark(place, [one for one in found if one.path.parent == place and not one.problems])
    return found


def _walk(directory: Place) -> Iterator[Found]:
    if (directory / manifests.NAME).is_file():
        yield _look(directory)
    elif left_over(directory):
        yield Found(directory, problems=["a save that is going on, or was cut short"])
    else:
        for path in directory.iterdir():
            if path.is_dir():
                yield from _walk(path)


def _look(path: Place) -> Found:
    found = Found(path)
    try:
        values = manifests.read(path)
        values.setdefault("created", "")
        found.manifest = values
        found.problems = manifests.problems(path, values)
    except CheckpointError as error:
        found.problems = [str(error).rpartition(": bad ")[2] or str(error)]
    return found


def _updates(found: Found) -> float:
    assert found.manifest is not None
    return float(found.manifest["progress"].get("update", 0))


def _mark(place: Place, complete: list[Found]) -> None:
    """Say which one the pointer names, and which the books in the newest one call the best."""
    by_path: dict[Place, Found] = {one.path: one for one in complete}
    try:
        name = json.loads((place / POINTER).read_text(encoding="utf-8"))["path"]
        by_path[place / str(name)].marks.append("last")
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no pointer, or one that names nothing that is here
    if not complete or not complete[-1].manifest:
        return
    try:
        callbacks = read_state(complete[-1].path, complete[-1].manifest)["callbacks"].values()
    except CheckpointError:
        return
    for state in callbacks:
        scores = state.get("best")
        if not isinstance(scores, dict) or state.get("mode") not in ("min", "max") or not scores:
            continue
        best = (min if state["mode"] == "min" else max)(scores, key=scores.__getitem__)
        if (one := by_path.get(place / str(best).rpartition("/")[2])) is not None:
            one.marks.append(f"best {state.get('monitor')}")
