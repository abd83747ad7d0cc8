"""The language model on Python's manual: trained at reduced size, then made to write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trivet
from full import FULL

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
LINE = re.compile(r"^fit: .*val/loss ([0-9.]+).*checkpoint: (.+)$", re.MULTILINE)


def fit(root: Path, *flags: str) -> tuple[float, str]:
    """The loss in nats per character, and the checkpoint."""
    argv = [sys.executable, "char_lm.py", "fit", "--seed", "1", "--default_root_dir", str(root), *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(argv, cwd=EXAMPLES, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = LINE.search(ended.stdout)
    assert found is not None, ended.stdout
    return float(found[1]), found[2]


def test_it_learns_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--model.width", "32", "--model.layers", "1", "--model.context", "32", "--data.context", "32"]
    short = ["--max_steps", "60", "--val_check_interval", "60", "--limit_val_batches", "4", "--model.warmup", "5"]
    loss, checkpoint = fit(tmp_path, *small, *short)
    assert loss < 3.0  # it begins at 4.5, and the frequencies of characters alone give 3.2

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import char_lm

    model = char_lm.CharLM(width=32, layers=1, context=32, sample=40)
    trainer = trivet.Trainer(
        accelerator="cpu", max_epochs=1, enable_progress_bar=False, default_root_dir=tmp_path, logger=False
    )
    torch.manual_seed(1)
    found = trainer.predict(model, datamodule=char_lm.Topics(prompts=["The ", "class A"]), ckpt_path=checkpoint)
    assert found is not None
    (first,), (second,) = found
    assert (first[:4], len(first)) == ("The ", 44)
    assert (second[:7], len(second)) == ("class A", 47)
    assert first in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="takes two to three minutes: TRIVET_CI_FULL=1")
def test_the_defaults_reach_the_promised_loss(tmp_path: Path) -> None:
    assert fit(tmp_path, "--strategy", "ddp", "--devices", "2")[0] < 1.8
