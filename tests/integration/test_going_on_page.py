"""The commands on the page `docs/running/going_on.md`: the first is run until it has ended, the others are planned."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from trivet.commands import entry

HERE = Path(__file__)
PAGE = HERE.parents[2] / "docs" / "running" / "going_on.md"
NET = """
import torch, trivet
from torch.utils.data import DataLoader

class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(trivet.DataModule):
    def train_dataloader(self):
        return DataLoader([torch.ones(1)] * 4, 2)
"""
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line)[1:] for block in BLOCKS for line in block.splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    (tmp_path / "net.py").write_text(NET)


def test_the_first_is_given_until_it_has_ended(capsys):
    words = list(COMMANDS[0])
    for flag, value in (("--devices", "1"), ("--max_epochs", "2")):
        words[words.index(flag) + 1] = value  # of what the page says
    words += ["--accelerator", "cpu", "--enable_progress_bar", "false"]
    for said in ("begins afresh", "has ended (2 epochs, 4 updates; checkpoint: "):
        assert entry.run(words, prog="trivet")[0] == 0
        assert said in capsys.readouterr().err
    sys.modules.pop("net", None)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_planned(words, capsys):
    chosen = COMMANDS[0][1:5]  # what the page leaves out as "..."
    assert chosen[::2] == ["--model", "--data"]
    words = [word for one in words for word in (chosen if one == "..." else [one])]
    assert words[0] == "fit"
    assert entry.run(["plan", *words[1:], "--accelerator", "cpu"], prog="trivet")[0] == 0, capsys.readouterr().err
    assert "4" in capsys.readouterr().out
    sys.modules.pop("net", None)
