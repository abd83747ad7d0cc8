"""The bars of Lightning's names, drawn on a real pseudo-terminal by a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trivet.callbacks import RichProgressBar, TQDMProgressBar
from trivet.errors import ConfigurationError

pty = pytest.importorskip("pty")

PROGRAM = """
import sys
sys.path[:0] = [{here!r}]
from callback_runs import Net, loader, trainer
from trivet.callbacks import *
made = trainer({root!r}, {bar}, max_epochs=2, enable_progress_bar=True, enable_checkpointing=False)
made.fit(Net(), loader(), loader(8))
made.validate(Net(), loader(8))
print("THE END")
"""


def on_a_terminal(bar: str, root: Path) -> str:
    """What a program with this bar writes on a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    code = PROGRAM.format(here=str(Path(__file__).parent), root=str(root), bar=bar)
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, env=environ) as program:
        os.close(theirs)
        chunks = []
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how Linux says that nobody has the other side any more
                break
            if not chunk:
                break
            chunks.append(chunk)
        assert program.stderr is not None
        errors = program.stderr.read().decode()
    os.close(ours)
    assert program.returncode == 0, errors
    return b"".join(chunks).decode()


@pytest.mark.parametrize("bar", ["RichProgressBar(leave=True)", "TQDMProgressBar()"])
def test_on_a_terminal(tmp_path: Path, bar: str) -> None:
    text = on_a_terminal(bar, tmp_path)
    assert "epoch 1/2" in text
    assert "epoch 2/2" in text
    assert "8/8" in text
    assert "\x1b[" in text
    assert text.rstrip().endswith("THE END")
    assert ("epoch 1/2" in text.partition("epoch 2/2")[2]) is ("leave" in bar)  # drawn again above the second


def test_a_rate_of_0_shows_nothing(tmp_path: Path) -> None:
    assert "epoch" not in on_a_terminal("TQDMProgressBar(refresh_rate=0)", tmp_path)


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match="refresh_rate=-1"):
        TQDMProgressBar(refresh_rate=-1)
    with pytest.raises(ConfigurationError, match="no themes"):
        RichProgressBar(theme=object())
    bar = RichProgressBar()
    bar.disable()
    assert not bar.enabled
    bar.enable()
    assert bar.enabled
