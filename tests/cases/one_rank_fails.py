"""A model that raises ValueError("boom") at one place, on rank 1 alone. Run by test_c11_one_rank_raises.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def boom(here: str, place: str, rank: int) -> None:
    if here == place and rank == 1:
        Path(os.environ["NOTES"], "failed-at").write_text(str(time.time()))
        raise ValueError("boom")


class Data(Dataset[Tensor]):
    """With worker processes: the one that reads sample 5, which is rank 1's, raises."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        boom("__getitem__", self.place, int(index == 5))
        return torch.ones(1)


class Failing(trivet.Module):
    def __init__(self, place: str = "training_step", notes: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.place = place
        os.environ["NOTES"] = self.notes = notes or os.environ["NOTES"]

    def note(self, text: str) -> None:
        with open(Path(self.notes, f"hooks-{self.rank}"), "a") as file:
            file.write(text + "\n")

    def boom(self, here: str) -> None:
        boom(here, self.place, self.rank)

    def setup(self, stage: str) -> None:
        os.environ["NOTES"] = self.notes
        self.rank = int(os.environ["RANK"])
        Path(self.notes, f"pid-{self.rank}").write_text(str(os.getpid()))
        self.boom("setup")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.boom("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.boom("training_step")
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.boom("validation_step")
        self.log("val", batch.mean())

    def on_exception(self, exception: BaseException) -> None:
        self.note(f"on_exception {type(exception).__name__}: {exception}")

    def teardown(self, stage: str) -> None:
        self.note("teardown")

    def train_dataloader(self) -> DataLoader[Tensor]:
        workers = 2 if self.place == "__getitem__" else 0
        return DataLoader(Data(self.place), 1, num_workers=workers)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Data(""), 2)


class FailingCallback(trivet.Callback):
    def on_train_batch_end(
        self, trainer: trivet.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module.boom("callback")


def fit(place: str, notes: str, **options: Any) -> None:
    trainer = trivet.Trainer(
        accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[FailingCallback()], **options,
    )  # fmt: skip
    trainer.fit(Failing(place, notes))


if __name__ == "__main__":
    fit(os.environ["PLACE"], os.environ["NOTES"])
