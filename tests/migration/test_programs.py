"""Eight programs in the style of Lightning's documentation give the same numbers under Lightning and under the shim."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from program_runs import DIFFERENCES, EXPECTED, PROGRAMS, run

# An interpreter that has Lightning; without it, and where this one has none, what Lightning gave was recorded.
LIGHTNING = os.environ.get("TRIVET_LIGHTNING_PYTHON") or (
    sys.executable if importlib.util.find_spec("pytorch_lightning") else ""
)


def same(found: Any, expected: Any, where: str = "") -> None:
    """Equal, numbers to 1e-6."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name, value in expected.items():
            same(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            same(found[number], value, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-6, rel=1e-6), where
    else:
        assert found == expected, where


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXPECTED.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_shim_gives_what_lightning_gave(name: str, tmp_path: Path) -> None:
    found = run(name, sys.executable, "-m", "trivet.compat.lightning", folder=tmp_path)
    same(found, recorded()["results"][name], name)


@pytest.mark.slow
@pytest.mark.skipif(not LIGHTNING, reason="TRIVET_LIGHTNING_PYTHON names no interpreter that has Lightning")
@pytest.mark.parametrize("name", [*PROGRAMS, DIFFERENCES])
def test_lightning_gives_what_it_gave(name: str, tmp_path: Path) -> None:
    same(run(name, LIGHTNING, folder=tmp_path), recorded()["results"][name], name)


def test_the_record_is_of_lightning_and_complete() -> None:
    found = recorded()
    assert found["made by"]["pytorch_lightning"] == "2.6.6"
    assert found["results"].keys() == {*PROGRAMS, DIFFERENCES}
