"""A cluster's programs as stubs on PATH, and a script that trains the same whatever starts it."""

from __future__ import annotations

import functools
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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
        if "SLOW" in os.environ:
            Path(os.environ["OUT"] + "-begun").touch()
            time.sleep(float(os.environ["SLOW"]))
    def on_train_end(self):
        state = self.layer.state_dict()
        whole = {name: getattr(value, "full_tensor", lambda: value)() for name, value in state.items()}
        if self.trainer.is_global_zero:
            torch.save(whole, os.environ["OUT"])

class Data(trivet.DataModule):
    def train_dataloader(self):
        x = torch.arange(48, dtype=torch.float64).view(16, 3) / 48
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)

if __name__ == "__main__":
    trivet.cli(Net, Data)
"""
COMMAND = ("fit", "--accelerator", "cpu", "--global_batch_size", "4", "--max_epochs", "2", "--precision", "fp64",
           "--enable_progress_bar", "false")  # fmt: skip


@functools.cache
def one_process() -> dict[str, torch.Tensor]:
    """The weights that one process trains by `COMMAND`: what two have to train, whoever started them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(TRAIN)
        environ = {**os.environ, "OUT": str(Path(folder, "trained.pt"))}
        subprocess.run([sys.executable, "net.py", *COMMAND], cwd=folder, env=environ, check=True)
        trained: dict[str, torch.Tensor] = torch.load(Path(folder, "trained.pt"))
    return trained


def trains_as_one_process(found: Path | dict[str, torch.Tensor]) -> None:
    """The check of every launcher: the same global batches leave the same parameters."""
    found = torch.load(found) if isinstance(found, Path) else found
    expected = one_process()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


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
