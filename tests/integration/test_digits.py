"""The digits example, in both forms in which its readers start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
LINE = re.compile(r"^fit: (\d+) epochs, (\d+) updates, .*val/acc ([0-9.]+), .*checkpoint: (.+)$", re.MULTILINE)


def command(program: list[str], root: Path, *flags: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    argv = [sys.executable, *program, "--default_root_dir", str(root), *flags]
    ended = subprocess.run(argv, cwd=EXAMPLES, env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_as_a_script_on_two_processes_and_validated_afterwards(tmp_path: Path) -> None:
    flags = ["--strategy", "ddp", "--devices", "2", "--precision", "bf16", "--max_epochs", "3", "--model.width", "16"]
    out = command(["digits.py", "fit"], tmp_path, *flags)
    found = LINE.search(out)
    assert found is not None, out
    epochs, updates, accuracy, checkpoint = found.groups()
    assert (epochs, updates) == ("3", "69")
    assert float(accuracy) > 0.85
    assert [path.name for path in tmp_path.iterdir()] == ["version_0"]
    program = [
        "-m",
        "trivet",
        "validate",
        "--model",
        "digits.Digits",
        "--model.width",
        "16",
        "--data",
        "digits.DigitsData",
    ]
    out = command(program, tmp_path, "--ckpt_path", checkpoint, "--precision", "bf16")
    assert f"val/acc {accuracy}" in out


def test_by_class_path_on_one_process(tmp_path: Path) -> None:
    program = ["-m", "trivet", "fit", "--model", "digits.Digits", "--data", "digits.DigitsData"]
    out = command(program, tmp_path, "--max_epochs", "2", "--model.width=8", "--data.batch_size", "64", "--seed", "1")
    found = LINE.search(out)
    assert found is not None, out
    assert found[2] == "46"
    again = command(program, tmp_path, "--max_epochs", "2", "--model.width=8", "--data.batch_size", "64", "--seed", "1")
    assert LINE.search(again)[0].split("; checkpoint")[0] == found[0].split("; checkpoint")[0]
    same = [command(program, tmp_path, "--max_epochs", "1", "--model.width=8") for _ in range(2)]  # without a seed
    assert len({LINE.search(out)[0].split("; checkpoint")[0] for out in same}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--strategy", "ddp", "--devices", "2", "--precision", "bf16"], ["--seed", "1"]])
def test_the_defaults_reach_the_promised_accuracy(tmp_path: Path, flags: list[str]) -> None:
    found = LINE.search(command(["digits.py", "fit"], tmp_path, *flags))
    assert found is not None
    assert float(found[3]) >= 0.97
