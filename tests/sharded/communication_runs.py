"""The module that the tests of communication train, and the tasks of two ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.callbacks import Callback
from zero_runs import counting

SAMPLES = 40  # with batches of 2 on 2 ranks: 10 updates an epoch


class Net(trivet.Module):
    """Two matrices that PowerSGD compresses, a vector and a buffer that is not the same on all ranks."""

    def __init__(self, optimizer: str = "AdamW", manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.automatic_optimization = not manual
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Dropout(0.2), nn.Linear(48, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = ((self.net(x) - y) ** 2).mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.02, **options)


class Ranks(Callback):
    """What this rank's weights are after each update."""

    def __init__(self) -> None:
        self.course: list[Tensor] = []

    def on_update_end(self, trainer: Any, module: Any) -> None:
        self.course.append(vector(module))


class Save(Callback):
    """Save after so many updates, in the middle of a fit."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_update_end(self, trainer: Any, module: Any) -> None:
        if trainer.progress.update == self.after:
            trainer.save_checkpoint(self.path)


def vector(module: nn.Module) -> Tensor:
    """Parameters, and the buffers behind them."""
    return torch.cat([t.detach().double().reshape(-1) for t in (*module.parameters(), *module.buffers())])


PARAMETERS = sum(param.numel() for param in Net().parameters())


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 12, generator=generator), torch.randn(SAMPLES, 4, generator=generator))
    return DataLoader(data, 2, shuffle=True)


def trainer(strategy: Any, devices: int = 2, **options: Any) -> trivet.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1}
    return trivet.Trainer(accelerator="cpu", strategy=strategy, devices=devices, **{**quiet, **options})


def course(strategy: Any, net: dict[str, Any] | None = None, devices: int = 2, **options: Any) -> list[Tensor]:
    """Task: the weights after each update, and at the end."""
    module, seen = Net(**net or {}), Ranks()
    trainer(strategy, devices, callbacks=[seen], **options).fit(module, loader())
    return [*seen.course, vector(module)]


def resumed(strategy: Any, path: Path, after: int, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Task: the course of a run that saves on its way, and of one that goes on from there."""
    module, seen = Net(), Ranks()
    trainer(strategy, callbacks=[seen, Save(path, after)], **options).fit(module, loader())
    whole = [*seen.course[after:], vector(module)]
    return whole, from_checkpoint(strategy, path, **options)[0]


def from_checkpoint(strategy: Any, path: Path, devices: int = 2, **options: Any) -> tuple[list[Tensor], list[str]]:
    """Task: the course from a checkpoint, and warnings on the way."""
    module, seen = Net(), Ranks()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy, devices, callbacks=[seen], **options).fit(module, loader(), ckpt_path=path)
    return [*seen.course, vector(module)], [str(one.message) for one in caught]


def sent(strategy: Any, updates: int) -> dict[str, list[int]]:
    """Task: bytes of every all-reduce in so many updates, after the first."""
    into: dict[str, list[int]] = {}
    with counting(into):
        trainer(strategy, max_steps=updates).fit(Net(), loader())
    return into
