"""What `test_exact_resume` runs: a training that depends on everything that a checkpoint has to hold."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy
import torch
import torchmetrics
import trivet
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trivet.callbacks import EarlyStopping
from trivet.capture import by_name
from trivet.layout import whole
from trivet.testing import cells
from trivet.testing.subject import Cell

SAMPLES, BATCH_SIZE, EPOCHS = 22, 2, 3
PLACES = ("within the first epoch", "at an epoch's end", "within a later epoch")
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "zero1": 2, "zero2": 2, "zero3": 2}
PRECISIONS = ("fp32", "fp64", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true")


@dataclass(frozen=True)
class Case:
    """A run, and where it is interrupted."""

    strategy: str
    precision: str
    accumulate: int
    workers: int
    place: str

    def __str__(self) -> str:
        return f"{self.strategy}-{self.precision}-k{self.accumulate}-{self.workers} workers-{self.place}"

    @property
    def world_size(self) -> int:
        return STRATEGIES[self.strategy]

    @property
    def interrupted_at(self) -> int:
        """The update after which it ends; the last of an epoch is made of fewer batches."""
        per_epoch = -(-SAMPLES // (BATCH_SIZE * self.world_size * self.accumulate))
        return {PLACES[0]: 1, PLACES[1]: per_epoch, PLACES[2]: per_epoch + 2}[self.place]


def cases() -> list[Case]:
    """All that negotiation admits."""
    every = (Case(*values) for values in product(STRATEGIES, PRECISIONS, (1, 2), (0, 2), PLACES))
    return [c for c in every if cells.outcome(Cell(c.strategy, c.precision, c.world_size)) == "ok"]


def cover(every: list[Case]) -> list[Case]:
    """Few cases with each pair of values, but for strategy and precision together, which the conformance suites have.

    Greedy; where two bring as much, another strategy and precision, then one without workers, which are slow to start.
    """

    def pairs(case: Case) -> set[Any]:
        values = list(enumerate((case.strategy, case.precision, case.accumulate, case.workers, case.place)))
        return {pair for pair in combinations(values, 2) if (pair[0][0], pair[1][0]) != (0, 1)}

    chosen: list[Case] = []
    missing = set().union(*map(pairs, every))
    while missing:
        met = {(case.strategy, case.precision) for case in chosen}
        worth = [(len(pairs(c) & missing), (c.strategy, c.precision) not in met, not c.workers) for c in every]
        best = every[worth.index(max(worth))]
        chosen.append(best)
        missing -= pairs(best)
    return chosen


# ------------------------------------------------------------------------------------------------------------ the run


class Augmented(Dataset[Any]):
    """Each sample is changed by random numbers of Python, numpy and torch. ``reads`` counts, also among workers."""

    def __init__(self) -> None:
        self.reads = torch.zeros(SAMPLES, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        noise = torch.rand(4) * random.random() + float(numpy.random.rand())
        return index, index / SAMPLES + 0.1 * noise


@dataclass
class Seen:
    """What one rank saw, and how often its data set was asked for a sample."""

    steps: list[tuple[int, list[int], float]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)
    reads: int = 0


class Net(trivet.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 1))
        self.metric = torchmetrics.MeanMetric()
        self.path, self.seen = path, Seen()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x = batch
        loss: Tensor = (self.net(x) - random.random() * x.sum(1, keepdim=True)).pow(2).mean()
        self.seen.steps.append((self.current_epoch, index.tolist(), loss.item()))
        self.metric.update(loss.detach().float())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).float().pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)  # an eps that fp16 can hold
        plateau = {"scheduler": ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5), "monitor": "val"}
        step = {"scheduler": StepLR(optimizer, 2, 0.9), "interval": "update"}
        return [optimizer], [step, {"scheduler": ExponentialLR(optimizer, 0.8)}, plateau]

    def on_train_end(self) -> None:
        """All that can be compared, gathered; and the checkpoint of a run that is interrupted here."""
        engine, trainer = self._attached().engine, self.trainer
        (optimizer,) = engine.optimizers
        found = by_name(optimizer, engine.names, engine.strategy)
        self.seen.end = {
            "weights": {name: whole(t).clone() for name, t in engine.strategy.state_dict(engine.module).items()},
            "optimizer": {n: {k: _whole(v) for k, v in values.items()} for n, values in found["state"].items()},
            "groups": found["groups"],
            "schedulers": [schedule.scheduler.state_dict() for schedule in engine.schedules],
            "scaler": None if engine.scaler is None else engine.scaler.state_dict(),
            "progress": {k: v for k, v in trainer.progress.to_dict().items() if k != "seconds"},
            "metrics": dict(trainer.callback_metrics),
            "callbacks": [_comparable(callback) for callback in trainer.callbacks],
        }
        trainer.save_checkpoint(self.path)


def _whole(value: Any) -> Any:
    return whole(value).clone() if isinstance(value, Tensor) else value


def _comparable(callback: trivet.Callback) -> dict[str, Any]:
    """The state of a callback, without the directory of its files."""
    if not isinstance(callback, trivet.Checkpoint):
        return callback.state_dict()
    best = {Path(path).name: score for path, score in callback.best_k_models.items()}
    return {"best": best, "last": Path(callback.last_model_path).name, "score": callback.best_model_score}


def fit(case: Case, folder: Path, seed: int, origin: Path | None, max_steps: int) -> Seen:
    torch.manual_seed(seed)
    module, data = Net(folder / "saved"), Augmented()
    callbacks = [
        EarlyStopping("val", patience=5),
        trivet.Checkpoint(folder / "kept", monitor="val", save_top_k=2, filename="{epoch}-{val:.6f}"),
    ]
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=case.strategy, precision=case.precision, devices=case.world_size, logger=False,
        max_epochs=EPOCHS, max_steps=max_steps, accumulate_grad_batches=case.accumulate, callbacks=callbacks,
        num_sanity_val_steps=0, enable_progress_bar=False, exact_resume=True,
    )  # fmt: skip
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=case.workers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="EarlyStopping never looked")  # interrupted before a validation
        trainer.fit(module, loader, DataLoader(TensorDataset(torch.rand(6, 4)), 2), ckpt_path=origin)
    module.seen.reads = int(data.reads.sum())
    return module.seen


def resumed(case: Case, folder: Path) -> tuple[Seen, Seen, Seen]:
    """Task: the whole run; the run that is interrupted; the one that goes on from there."""
    whole_run = fit(case, folder / "whole", 5, None, -1)
    first = fit(case, folder / "parts", 5, None, case.interrupted_at)
    return whole_run, first, fit(case, folder / "parts", 99, folder / "parts" / "saved", -1)
