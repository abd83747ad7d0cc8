"""A file of the structure that Lightning 2.6 writes, made by hand, and the module that it belongs to.

As a script, where Lightning is installed: ``python lightning_file.py FILE`` trains the same module with Lightning and
writes its checkpoint, to compare the two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def layers(width: int) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(3, width), "norm": nn.BatchNorm1d(width), "b": nn.Linear(width, 1)})


def forward(net: nn.ModuleDict, x: Tensor) -> Tensor:
    found: Tensor = net["b"](net["norm"](net["a"](x))).square().mean()
    return found


def optimizers(net: nn.ModuleDict, lr: float) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(16, 3, generator=generator)), 4)


def epochs(net: nn.ModuleDict, optimizer: Any, schedule: Any, count: int) -> None:
    """What any trainer does."""
    for _ in range(count):
        for (x,) in loader():
            optimizer.zero_grad()
            forward(net, x).backward()
            optimizer.step()
        schedule.step()


def progress(ready: int, processed: int, completed: int) -> dict[str, Any]:
    counts = {"ready": ready, "started": ready, "processed": processed, "completed": completed}
    return {"total": dict(counts), "current": dict(counts)}


def by_hand(path: Path, *, late: bool = True, **more: Any) -> None:
    """After one epoch, as Lightning saves it: ``late``, after the schedule was stepped, or before."""
    net = layers(5)
    (optimizer,), (schedule,) = optimizers(net, 0.01)
    epochs(net, optimizer, schedule, 1)
    scheduled = schedule.state_dict()
    packed = optimizer.state_dict()
    if not late:
        scheduled |= {"last_epoch": 0, "_step_count": 1, "_last_lr": [0.01]}
        packed["param_groups"][0]["lr"] = 0.01
    batches = {**progress(4, 4, 4), "is_last_batch": True}
    loop = {"epoch_progress": progress(1, 1, 0), "epoch_loop.batch_progress": batches, "state_dict": {}}
    stored = {
        "epoch": 0,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"net.{name}": tensor for name, tensor in net.state_dict().items()},
        "loops": {"fit_loop": loop},
        "callbacks": {"EarlyStopping{'monitor': 'v', 'mode': 'min'}": {"wait_count": 0, "best_score": torch.ones(())}},
        "optimizer_states": [packed],
        "lr_schedulers": [scheduled],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 5, "lr": 0.01},
        "mine": {"a": [1, 2]},
        **more,
    }
    torch.save(stored, path)


def with_lightning(path: Path, *, max_epochs: int = 1) -> None:
    import pytorch_lightning as pl  # type: ignore[import-not-found, unused-ignore]

    class Net(pl.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self, width: int = 5, lr: float = 0.01) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = layers(width)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return forward(self.net, batch[0])

        def configure_optimizers(self) -> Any:
            return optimizers(self.net, self.hparams.lr)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"a": [1, 2]}

    save = pl.callbacks.ModelCheckpoint(path.parent, filename=path.stem)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=max_epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[save],
    )  # fmt: skip
    trainer.fit(Net(), loader())


if __name__ == "__main__":
    with_lightning(Path(sys.argv[1]))
