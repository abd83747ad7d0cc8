"""The smallest model: one parameter w, which starts at 0, loss = w * x, SGD with learning rate 1: exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from trivet.loggers.logger import Logger


class Numbers(Dataset[Tensor]):
    """Sample i is the number i, or the i-th of the given ones; ``seen`` lists the indices that were read here."""

    def __init__(self, values: int | Sequence[float]) -> None:
        self.values = list(range(values)) if isinstance(values, int) else list(values)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        self.seen.append(index)
        return torch.tensor(float(self.values[index]))


def loader(values: int | Sequence[float], batch_size: int = 1, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(values), batch_size, **options)


class Scalar(trivet.Module):
    """Under manual optimization it steps by itself, with the usual three calls."""

    def __init__(self, *, lr: float = 1.0, manual: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.lr = lr
        self.automatic_optimization = not manual
        self.history: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.w * batch.to(self.w.dtype).mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_update_end(self) -> None:
        self.history.append(self.w.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Memory(Logger):
    """Keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.hparams: dict[str, Any] = {}
        self.status = ""

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any) -> None:
        self.hparams.update(params)

    def finalize(self, status: str) -> None:
        self.status = status

    def column(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]


def trainer(**options: Any) -> trivet.Trainer:
    """A Trainer on the CPU that writes and prints nothing unless told to."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    }  # fmt: skip
    if "max_steps" not in options and "max_time" not in options:
        quiet["max_epochs"] = 1
    return trivet.Trainer(**(quiet | options))
