"""Lightning's Trainer."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from speed_tasks import Asked, Batch, Task
from torch import Tensor, nn

SUPPORTS = {"bf16", "clip", "callbacks", "empty_callbacks", "metrics", "conveniences"}


class Empty(pl.Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}{self.number}"


class Noop(Empty):
    def on_train_batch_start(self, *args: Any) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Net(pl.LightningModule):
    def __init__(self, task: Task, metrics: int, on_bar: bool) -> None:
        super().__init__()
        self.net, self.loss_of, self.make = task.model(), task.loss, task.optimizer
        self.names, self.on_bar = [f"metric{n}" for n in range(metrics)], on_bar

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.loss_of(self.net(x), y)
        for name in self.names:
            self.log(name, loss, prog_bar=self.on_bar)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def fit(task: Task, asked: Asked) -> nn.Module:
    net = Net(task, 3 if asked.conveniences else asked.metrics, asked.conveniences)
    callbacks: list[Any] = [Noop(n) for n in range(asked.callbacks)] + [Empty(n) for n in range(asked.empty_callbacks)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=task.epochs,
        precision="bf16-mixed" if asked.bf16 else "32-true",
        gradient_clip_val=asked.clip,
        callbacks=[*callbacks, *([ModelCheckpoint(asked.folder / "lightning")] if asked.conveniences else [])],
        logger=CSVLogger(asked.folder) if asked.conveniences else False,
        enable_checkpointing=asked.conveniences,
        enable_progress_bar=asked.conveniences,
        enable_model_summary=False,
    )
    trainer.fit(net, task.loader())
    return net.net
