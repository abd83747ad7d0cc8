"""The README's commands: complete, and made of files and options that exist. `.ci/run` runs the second one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(name: str) -> str:
    script = [sys.executable, ROOT / ".ci" / "readme_command.py", name]
    return subprocess.run(script, text=True, capture_output=True, check=True).stdout


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_readme_command_can_be_pasted_into_a_fresh_clone(name: str) -> None:
    text = command(name)
    assert "venv" in text
    assert "-c constraints.txt" in text
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    for path in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / path).is_file()
    syntax = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (syntax.returncode, syntax.stderr) == (0, "")


def test_the_readme_trains_the_example_with_three_flags() -> None:
    assert "docs/examples/digits.py fit --strategy ddp --devices 2 --precision bf16" in command("train")


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert ".ci/readme_command.py test" in script.read_text()


def test_constraints_pin_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    assert all("==" in line and "+" not in line for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [r for name in ("examples", "test", "lint", "docs") for r in extras[name]]
    names = {re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in wanted}
    assert names <= pinned, f"not pinned: {sorted(names - pinned)}"
