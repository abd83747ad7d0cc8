"""What the tests of kills, signals and restarts train: small, with dropout, shuffling and Adam, and in pauses."""

import os
import signal
import time
from pathlib import Path

import torch
import trivet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if "TRIVET_TEST_SLOW_MS" in os.environ:

    def _slowed(function):
        def slow(*args, **options):
            time.sleep(float(os.environ["TRIVET_TEST_SLOW_MS"]) / 1000)
            return function(*args, **options)

        return slow

    for name in ("fsync", "rename"):
        setattr(os, name, _slowed(getattr(os, name)))


class Net(trivet.Module):
    """``pause`` seconds are slept in each step. ``kill`` (``"rank update number"``): that rank ends itself by the
    signal at that update, once per directory ``mark``."""

    def __init__(self, pause: float = 0.0, kill: str = "", mark: str = "", lr: float = 0.01, dropout: float = 0.2):
        super().__init__()
        self.pause, self.kill, self.mark, self.lr = pause, kill, mark, lr
        self.save_hyperparameters("lr", "dropout")
        self.net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3), nn.Linear(3, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(self.pause)
        for order in filter(None, self.kill.split(",")):
            rank, update, number = map(int, order.split())
            if (self.trainer.global_rank, self.trainer.progress.update) == (rank, update):
                self._kill(update, number)
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def _kill(self, update, number):
        mark = Path(self.mark, f"killed-at-{update}")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), number or signal.SIGKILL)

    def on_before_optimizer_step(self, optimizer):
        gradients = [one.grad for one in self.parameters()]
        if not hasattr(gradients[0], "placements"):  # of ddp: those of the whole update
            self.log("norm", torch.nn.utils.get_total_norm(gradients), on_step=True, on_epoch=False)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Data(trivet.DataModule):
    def __init__(self, batch_size: int = 4, samples: int = 96):
        self.batch_size, self.samples = batch_size, samples

    def train_dataloader(self):
        x = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(x, x.sum(1, keepdim=True).sin())
        return DataLoader(data, self.batch_size, shuffle=True)


if __name__ == "__main__":
    trivet.cli(Net, Data)
