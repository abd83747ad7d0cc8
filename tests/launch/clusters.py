"""A cluster's programs as stubs on PATH, and a script that trains the same whatever starts it."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TRAIN = """
import os, signal, time
from pathlib import Path
import torch, trivet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(trivet.Module):
    waits = False
    def __init__(self, lr: float = 0.1):
        super().__init__()
        torch.manual_seed(1)
        self.lr, self.layer = lr, nn.Linear(3, 1).double()
    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        mark = Path(os.environ.get("MARK") or os.devnull)
        if not mark.exists() and self.trainer.progress.update == 3 and self.trainer.is_global_zero:
            mark.touch()
            os.kill(os.getpid(), signal.SIGUSR1)
            self.waits = True
        if self.waits:
            time.sleep(0.5)  # the other rank hears of it through the store
    def on_train_end(self):
        if self.trainer.is_global_zero:
            torch.save(self.layer.state_dict(), os.environ["OUT"])

class Data(trivet.DataModule):
    def train_dataloader(self):
        x = torch.arange(48, dtype=torch.float64).view(16, 3) / 48
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)

if __name__ == "__main__":
    trivet.cli(Net, Data)
"""
COMMAND = ("fit", "--accelerator", "cpu", "--global_batch_size", "4", "--max_epochs", "2", "--precision", "fp64",
           "--enable_progress_bar", "false")  # fmt: skip


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """``stub(name, script)``: a program on PATH, before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return write


def free_port() -> int:
    """A port that nobody has, among those that environments work out."""
    for port in range(15_000 + os.getpid() % 10_000, 30_000):
        with socket.socket() as one:
            try:
                one.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
