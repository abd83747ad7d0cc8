"""Runs a program of this folder as a user would, under Lightning or under the shim.

``python program_runs.py`` in an environment with Lightning writes what it gives to expected.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DIFFERENCES = "differences"  # the program whose numbers differ on purpose
EXPECTED = HERE / "expected.json"
CLI = [
    *(
        "fit",
        "--config",
        str(HERE / "programs" / "command_line.yaml"),
        "--model.scale",
        "2",
        "--trainer.max_epochs",
        "2",
    ),
    *("--losses.digits", "7", "--note", "hello", "--data.batch_size=6"),
]
PROGRAMS: dict[str, list[str]] = {
    "autoencoder": [],
    "classifier": [],
    "command_line": CLI,
    "data_module": [],
    "early_stopping": [],
    "gan": [],
    "metrics": [],
    "resumed": [],
}


def run(name: str, *interpreter: str, folder: Path) -> dict[str, Any]:
    """What the program prints as its result. ``interpreter`` is the command that it is given to."""
    program = HERE / "programs" / f"{name}.py"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*interpreter, str(program), *PROGRAMS.get(name, [])],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def record() -> None:
    import tempfile
    from importlib.metadata import version

    about = {name: version(name) for name in ("pytorch_lightning", "torch", "torchmetrics")}
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run(name, sys.executable, folder=Path(folder)) for name in (*PROGRAMS, DIFFERENCES)}
    EXPECTED.write_text(json.dumps({"made by": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    record()
