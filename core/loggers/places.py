"""Where a logger's files are: ``save_dir/name/version_N``, and which N is free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .logger import Logger, writing

HPARAMS = "hparams.yaml"


class FileLogger(Logger):
    """A logger whose files are in ``save_dir/name/version_N``."""

    save_dir: str
    _name: str
    _version: int | str | None
    _claimed = False  # whether the version is one that was free
    _goes_on_at: int | None = None  # the update of the checkpoint that a run goes on from in its own directory

    def earlier(self) -> list[int | str] | None:
        """The numbers of the versions that there are, None where one was given."""
        return list(versions(Path(self.root_dir))) if self._version is None or self._claimed else None

    def go_on(self, version: int | str | None, step: int | None) -> None:
        """Append to a version of this logger's own."""
        self._goes_on_at = step
        if version is not None:
            self._version, self._claimed = version, True

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        """The version; where none was given, the next free one is claimed by creating its directory."""
        if self._version is None:
            with writing(self):
                self._version, self._claimed = claim_version(Path(self.root_dir)), True
        return self._version

    @property
    def root_dir(self) -> str:
        """The directory of all versions."""
        return str(Path(self.save_dir, self._name))

    @property
    def log_dir(self) -> str:
        return str(version_dir(Path(self.root_dir), self.version))


def versions(root: Path) -> list[int]:
    """The numbers of the ``version_N`` that there are, in order."""
    taken = [path.name.removeprefix("version_") for path in root.glob("version_*")]
    return sorted(int(number) for number in taken if number.isdecimal())


def claim_version(root: Path) -> int:
    """Create and return the first free ``version_N``. Creating decides, so two runs that start together differ."""
    root.mkdir(parents=True, exist_ok=True)
    version = max(versions(root), default=-1) + 1
    while True:
        try:
            (root / f"version_{version}").mkdir()
        except FileExistsError:
            version += 1
        else:
            return version


def version_dir(root: Path, version: int | str) -> Path:
    """The directory of a version: a number, or a name of its own."""
    return root / (version if isinstance(version, str) else f"version_{version}")


def write_hparams(directory: Path, params: Mapping[str, Any]) -> None:
    """Write ``hparams.yaml``; keys of an earlier call are kept. Values unknown to YAML are written as repr."""
    import yaml  # type: ignore[import-untyped]

    directory.mkdir(parents=True, exist_ok=True)
    path = directory / HPARAMS
    known = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    text = yaml.safe_dump({**known, **plain(dict(params))}, sort_keys=False, allow_unicode=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def plain(value: Any) -> Any:
    """The value in types that YAML knows."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
