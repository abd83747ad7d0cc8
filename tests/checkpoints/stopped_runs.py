"""What `test_stopped_in_validation` runs: trainings in which a signal comes while a validation runs."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torchmetrics
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.callbacks import EarlyStopping, EMAWeightAveraging
from trivet.errors import Terminated
from trivet.layout import whole

BATCHES = 40  # of this rank in a validation
AT = 2  # the number of the validation in which the signal comes, from 1, and the batch of it
LAST = 3


class Net(trivet.Module):
    """``signalled``: whether the last rank gets SIGTERM within the validation `AT`, at its batch `LAST`."""

    def __init__(self, signalled: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1, bias=False))
        self.metric, self.silent = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.signalled, self.validations, self.seen = signalled, 0, 0
        self.losses: list[float] = []
        self.values: list[tuple[float, float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def on_validation_start(self) -> None:
        self.validations, self.seen = self.validations + 1, 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        value = self.net(batch[0]).square().mean()
        self.metric.update(value)
        self.silent.update(value)
        self.log("val", value)
        self.log("metric", self.metric)
        if self.signalled and self.validations == AT and self.seen >= LAST:
            if self.seen == LAST and self.trainer.is_last:
                signal.raise_signal(signal.SIGTERM)
            time.sleep(0.05)  # until the others know

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            found = self.trainer.callback_metrics
            self.values.append((float(found["val"]), float(found["metric"]), float(self.silent.compute())))
        self.silent.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return [optimizer], [{"scheduler": plateau, "monitor": "val", "strict": False}]


def fit(case: tuple[str, Any], folder: Path, *, signalled: bool = False, origin: str | None = None) -> dict[str, Any]:
    strategy, interval = case
    size = int(os.environ.get("WORLD_SIZE", "1"))
    module = Net(signalled)
    kept = trivet.Checkpoint(
        folder,
        monitor="val",
        save_top_k=2,
        filename="{update}-{val:.6f}",
        every_n_updates=3 if interval != 1.0 else None,
    )
    callbacks = [kept, EarlyStopping("val", patience=50), EMAWeightAveraging(decay=0.5)]
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=size, logger=False, max_epochs=3, callbacks=callbacks,
        num_sanity_val_steps=0, enable_progress_bar=False, val_check_interval=interval, deterministic=True,
    )  # fmt: skip
    trainer.is_last = int(os.environ.get("RANK", "0")) == size - 1
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    loaders = DataLoader(TensorDataset(data), 2, shuffle=True), DataLoader(TensorDataset(data.repeat(4, 1)), 1)
    loaders = loaders[0], DataLoader(TensorDataset(data.repeat(4, 1)[: BATCHES * size]), 1)
    ended: Any = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="EarlyStopping never looked")
            trainer.fit(module, *loaders, ckpt_path=origin)
    except Terminated as error:
        ended = (error.signal, error.update, error.checkpoint)
    weights = {} if ended else {name: whole(t).clone() for name, t in module.state_dict().items()}
    progress = {k: v for k, v in trainer.progress.to_dict().items() if k != "seconds"}
    best = {Path(path).name: score for path, score in kept.best_k_models.items()}
    return {
        "losses": module.losses, "values": module.values, "weights": weights, "ended": ended, "seen": module.seen,
        "progress": progress, "best": best, "metrics": dict(trainer.callback_metrics),
        "training": [part.training for part in module.modules()],
    }  # fmt: skip


def stopped(case: tuple[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Task: the whole run; the one that is ended by a signal within its second validation; the one that goes on."""
    whole_run = fit(case, folder / "whole")
    first = fit(case, folder / "parts", signalled=True)
    return whole_run, first, fit(case, folder / "parts", origin=first["ended"][2] if first["ended"] else None)
