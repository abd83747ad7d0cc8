"""The example with two optimizers that are stepped by hand, at reduced size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gan


@pytest.mark.parametrize("devices", ["1", "2"])
def test_the_points_come_near_the_circle(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, trainer = gan.main(["--epochs", "8", "--points", "2048", "--devices", devices])
    said = capsys.readouterr().out
    distance = float(said.split("distance from the circle ")[1].split()[0])
    assert distance < 0.6  # it begins at 0.9
    assert trainer.global_step == 8 * (32 if devices == "1" else 16)  # an update, whichever optimizers stepped
    assert said.count("(") == 8
