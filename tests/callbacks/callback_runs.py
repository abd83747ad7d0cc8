"""What the tests of callbacks train: a small regression whose validation loss the test can dictate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(trivet.Module):
    """Logs ``loss`` and ``val_loss``; the latter from ``script``, one value per validation, where one is given."""

    def __init__(self, script: Sequence[float] = (), schedule: str | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.script, self.schedule = list(script), schedule
        self.validations = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]).squeeze(1) - batch[1]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = (self.net(batch[0]).squeeze(1) - batch[1]).square().mean()
        self.log("val_loss", self.script[self.validations] if self.script else loss)

    def on_validation_end(self) -> None:
        self.validations += not self.trainer.sanity_checking

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.schedule}]


def loader(samples: int = 32, batch_size: int = 4) -> DataLoader[Any]:
    """The same data in the same order, whoever asks."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=draw)
    return DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size)


def trainer(root: Any, *callbacks: Any, **flags: Any) -> trivet.Trainer:
    """A quiet one on the CPU, with this rank's place in the world taken from the environment."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 4,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "default_root_dir": root,
        "log_every_n_steps": 4,
        "logger": False,
    }
    return trivet.Trainer(callbacks=list(callbacks), **{**defaults, **flags})
