"""What `test_pending_gradients` runs: manual optimization that steps after several batches."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import trivet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.layout import whole

EVERY = 3  # batches to a step


class Net(trivet.Module):
    """``mine`` steps every third batch, in its own accumulation; ``often`` in each. The second backward leaves
    gradients in ``often`` that its next zero_grad drops. With ``early`` a step is asked for in inner micro-batches
    alone, where it is put aside."""

    def __init__(self, path: Path | None, early: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.mine, self.often = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        self.path, self.early, self.batches = path, early, 0
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        mine, often = self.optimizers()
        often.zero_grad()
        self.manual_backward(self.often(self.mine(batch[0]).detach()).square().mean())
        often.step()
        self.manual_backward(self.often(self.mine(batch[0])).square().mean())
        number = self.trainer.progress.batch
        if (number % 4 == 0) if self.early else ((number + 1) % EVERY == 0):
            mine.step()
            mine.zero_grad()

    def on_update_end(self) -> None:
        self.batches = self.trainer.progress.earlier + self.trainer.progress.batch
        self.seen.append([self.batches, *whole(self.mine.weight.detach()).flatten().tolist()])
        if self.path is not None:
            self.trainer.save_checkpoint(f"{self.path}-{self.batches}")

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.mine.parameters(), lr=0.1), torch.optim.SGD(self.often.parameters(), lr=0.1)]


def fit(strategy: str, path: Path | None, origin: str | None = None, **options: Any) -> Any:
    """Rows of batches and weights, and warnings."""
    early = bool(options.get("accumulate_grad_batches"))
    module, size = Net(path, early), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, exact_resume=options.pop("exact", True), deterministic=True, **options,
    )  # fmt: skip
    data = torch.randn(8 * size, 3, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TensorDataset(data), 1), ckpt_path=origin)
    return module.seen, [str(one.message) for one in said if "no step had taken" in str(one.message)]


def resumed(strategy: str, folder: Path, options: dict[str, Any]) -> Any:
    """Task: the whole run, and one that goes on from each of its first checkpoints."""
    whole_run, _ = fit(strategy, folder / "at", **options)
    batches = [int(row[0]) for row in whole_run][:3]
    return whole_run, {batch: fit(strategy, None, f"{folder / 'at'}-{batch}", **options) for batch in batches}


def elsewhere(strategy: str, folder: Path, batch: int) -> Any:
    """Task: to go on under another strategy or number of processes."""
    return fit(strategy, None, f"{folder / 'at'}-{batch}", exact=False)
