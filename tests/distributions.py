"""Throw-away distributions: folders with metadata, put on sys.path by the fixture `install`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from trivet import registry

Install = Callable[..., Path]

GOOD = """
    import torch
    from trivet.plugins import Policy, Precision

    class Good(Precision):
        def __init__(self, *, width: int = 8, depth: int = 2) -> None:
            self.width, self.depth = width, depth

        @property
        def policy(self) -> Policy:
            return Policy()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(distribution, points, code)``: a module of the distribution's name and its entry points."""
    before = set(sys.modules)

    def write(
        distribution: str,
        points: str,
        code: str = GOOD,
        *,
        kind: str = "precision",
        version: str = "1.2",
        more: str = "",
    ) -> Path:
        folder = tmp_path / f"{distribution}-{len(sys.path)}"
        info = folder / f"{distribution}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{more}")
        (info / "entry_points.txt").write_text(f"[{registry.GROUPS[kind]}]\n{points}\n")
        (folder / f"{distribution}.py").write_text(dedent(code))
        monkeypatch.syspath_prepend(str(folder))
        return folder

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]
