"""The manifest of a checkpoint: the file that is written last and makes the directory a checkpoint."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from ..errors import CheckpointError
from .files import Place, force, opened
from .parts import TENSORS
from .sums import Sum, read_sum

NAME = "manifest.json"
MARKER = ".saving"  # of a save under way on a remote file system, see `remote`
FORMAT = "trivet-checkpoint"
VERSION = 1
LIMIT = 2.0**63
"""What no count of a run reaches."""


def make(
    directory: Place,
    sums: dict[str, Sum],
    *,
    progress: dict[str, Any],
    plan: dict[str, Any],
    metrics: dict[str, float] | None,
    world_size: int,
) -> dict[str, Any]:
    """The manifest of the files that now lie in ``directory``; those that are not in ``sums`` are read to be summed.

    Metrics that are not finite are stored as text.
    """
    import torch

    from .. import __version__

    paths = {_relative(path, directory): path for path in directory.rglob("*") if path.is_file()}
    paths.pop(MARKER, None)
    with ThreadPoolExecutor() as threads:
        unknown = [name for name in paths if name not in sums]
        sums = sums | dict(zip(unknown, threads.map(read_sum, (paths[name] for name in unknown)), strict=True))

    return {
        "format": FORMAT,
        "version": VERSION,
        "trivet": __version__,
        "torch": str(torch.__version__),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": world_size,
        "progress": progress,
        "plan": plan,
        "metrics": {k: float(v) if math.isfinite(v) else str(float(v)) for k, v in (metrics or {}).items()},
        "files": {name: dict(sums[name]) for name in sorted(paths)},
    }


def _relative(path: Place, directory: Place) -> str:
    return str(PurePosixPath(path.as_posix()).relative_to(directory.as_posix()))


def write(directory: Place, values: dict[str, Any]) -> None:
    """Write the manifest and force it, and with it the directory, to the disk."""
    with opened(directory / NAME, "x", encoding="utf-8") as file:
        json.dump(values, file, indent=1, allow_nan=False)
        force(file)


def read(directory: Place) -> dict[str, Any]:
    """The manifest, checked for its form. Raises `CheckpointError` with path and reason."""
    file = directory / NAME
    if not directory.exists():
        raise CheckpointError(f"cannot read checkpoint {str(directory)!r}: it does not exist")
    if directory.is_file():
        raise CheckpointError(f"cannot read checkpoint {str(directory)!r}: {_of_file(directory)}")
    if not file.is_file():
        raise CheckpointError(
            f"cannot read checkpoint {str(directory)!r}: it has no {NAME}; it is no checkpoint, or an incomplete one"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"), parse_constant=_no_constant)
        return _checked(values)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"cannot read checkpoint {str(directory)!r}: bad {NAME}: {error}") from error


def _of_file(path: Place) -> str:
    """What to do with a file, since a checkpoint is a directory."""
    if path.suffix == ".safetensors":
        return (
            "it is a file of weights alone. Load them into the module: "
            f"module.load_state_dict(safetensors.torch.load_file({str(path)!r}))"
        )
    if path.name == NAME:
        return f"it is a part of the checkpoint {str(path.parent)!r}; give that"
    return (
        "it is a file, and a checkpoint is a directory. If Lightning wrote it, make one of it: trivet checkpoint "
        f"convert {str(path)!r} -o NEW"
    )


def check_files(directory: Place, values: dict[str, Any]) -> None:
    """Raise `CheckpointError` with what is wrong with the files."""
    if wrong := problems(directory, values):
        raise CheckpointError(f"cannot read checkpoint {str(directory)!r}: {'; '.join(wrong)}")


def problems(directory: Place, values: dict[str, Any]) -> list[str]:
    """Each listed file that is missing, has another size or lies elsewhere, and each one among the tensors that is not
    listed."""
    wrong = []
    root = directory.resolve()
    for name, entry in values["files"].items():
        file = directory / name
        if not file.is_file():
            wrong.append(f"{name} is missing")
        elif not file.resolve().is_relative_to(root):
            wrong.append(f"{name} is a link that leaves the directory, to {str(file.resolve())!r}")
        elif file.stat().st_size != entry["size"]:
            wrong.append(f"{name} has {file.stat().st_size} bytes instead of {entry['size']}")
    shards = directory / TENSORS
    for name in sorted(file.name for file in shards.iterdir()) if shards.is_dir() else ():
        if f"{TENSORS}/{name}" not in values["files"]:
            wrong.append(f"{TENSORS}/{name} is not in the manifest")
    return wrong


def _checked(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if type(values.get("version")) is not int or values["version"] < 1:
        raise ValueError(f"its version is {values.get('version')!r}, expected a positive integer")
    if values["version"] > VERSION:
        raise ValueError(
            f"its format version is {values['version']}, this Trivet reads up to {VERSION}; it was written by "
            f"Trivet {values.get('trivet')!r}: update Trivet to read it"
        )
    for key in ("files", "progress", "plan", "metrics"):
        if not isinstance(values.get(key), dict):
            raise ValueError(f"{key!r} is {values.get(key)!r}, expected an object")
    if not is_progress(values["progress"]):
        raise ValueError(f"'progress' is {values['progress']!r}, expected numbers that are not negative")
    if not isinstance(values.get("created", ""), str):
        raise ValueError(f"'created' is {values['created']!r}, expected a string")
    for name, entry in values["files"].items():
        _check_name(name)
        if not isinstance(entry, dict) or type(entry.get("size")) is not int or entry["size"] < 0:
            raise ValueError(f"file {name!r} has the entry {entry!r}, expected an object with its size")
        if "crc32" in entry and type(entry["crc32"]) is not int:
            raise ValueError(f"file {name!r} has the checksum {entry['crc32']!r}, expected an integer")
    values["metrics"] = {name: float(value) for name, value in values["metrics"].items()}
    return values


def is_progress(value: Any) -> bool:
    """Whether it can be the progress of a run."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(number, (int, float)) and 0 <= number < LIMIT
        for name, number in value.items()
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's")


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if len(name) > 255 or any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise ValueError(f"the file name {name[:40]!r}... is none that a checkpoint has")
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
        raise ValueError(f"the file name {name!r} leaves the directory")
