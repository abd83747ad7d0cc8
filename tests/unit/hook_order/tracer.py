"""Notes every call of an overridden hook, under Lightning or under Trivet: the same program for both.

``python tracer.py OUT.json`` under an installation of Lightning writes what lightning.json holds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

STAGES = ("validation", "test", "predict")

MODULE = [
    "prepare_data", "setup", "teardown", "configure_callbacks", "configure_model", "configure_optimizers",
    "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end",
    *(f"on_{stage}{part}" for stage in STAGES for part in (
        "_start", "_end", "_epoch_start", "_epoch_end", "_batch_start", "_batch_end", "_model_eval")),
    "on_validation_model_zero_grad", "on_validation_model_train", "on_test_model_train",
    "training_step", "validation_step", "test_step", "predict_step",
    "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward", "on_after_backward",
    "optimizer_step", "on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step",
    "on_save_checkpoint", "on_load_checkpoint",
]  # fmt: skip

DATA = [
    "prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "state_dict", "load_state_dict", "on_exception",
]  # fmt: skip

CALLBACK = [
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end",
    "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end",
    *(f"on_{stage}{part}" for stage in STAGES for part in (
        "_start", "_end", "_epoch_start", "_epoch_end", "_batch_start", "_batch_end")),
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_exception",
    "state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint",
]  # fmt: skip


def word(value: Any) -> str:
    """An argument in a word."""
    if isinstance(value, str):
        return "".join(value)  # of Lightning's enumerations, too
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, torch.Tensor):
        return "loss" if value.ndim == 0 else "batch"
    if hasattr(value, "param_groups"):
        return "optimizer"
    if hasattr(value, "get_last_lr"):
        return "scheduler"
    if isinstance(value, BaseException):
        return "exception"
    return "outputs" if isinstance(value, dict) and "loss" in value else type(value).__name__ if isinstance(
        value, (dict, list)) else "closure"  # fmt: skip


def traced(base: type, names: list[str], letter: str, trace: list[str], skip: int = 0) -> type:
    """A subclass that notes the hooks, with their arguments but for the first ``skip``, and goes on to the base's."""

    def hook(name: str) -> Any:
        def method(self: Any, *args: Any, **named: Any) -> Any:
            given = args if name in ("state_dict", "load_state_dict") else args[skip:]
            trace.append(" ".join([letter, name, *map(word, (*given, *named.values()))]))
            return getattr(super(cls, self), name)(*args, **named)

        return method

    cls = type(f"Traced{base.__name__}", (base,), {name: hook(name) for name in names})
    return cls


def loader(length: int) -> DataLoader[Any]:
    return DataLoader(torch.ones(2 * length, 1), batch_size=2)


def program(library: Any, module_base: type, data_base: type, **quiet: Any) -> dict[str, list[str]]:
    """The traces of all entry points of a Trainer."""

    class Net(module_base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.fails = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails:
                raise ArithmeticError("for the trace")
            return {"loss": self.layer(batch).mean()}

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return self.layer(batch).mean()

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean()

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Data(data_base):  # type: ignore[misc]
        several = False

        def train_dataloader(self) -> Any:
            return loader(3)

        def val_dataloader(self) -> Any:
            return [loader(1), loader(2)] if self.several else loader(2)

        def test_dataloader(self) -> Any:
            return loader(1)

        def predict_dataloader(self) -> Any:
            return loader(2)

        def state_dict(self) -> Any:
            return {"data": 1}

    class Watch(library.Callback):  # type: ignore[misc]
        def state_dict(self) -> Any:
            return {"watch": 1}

    trace: list[str] = []
    found: dict[str, list[str]] = {}

    def fresh(**options: Any) -> tuple[Any, Any, Any]:
        trace.clear()
        trainer = library.Trainer(callbacks=[watch()], **(quiet | {"max_epochs": 1} | options))
        return trainer, module_class(), data_class()

    module_class = traced(Net, MODULE, "M", trace)
    data_class = traced(Data, DATA, "D", trace)
    watch = traced(Watch, CALLBACK, "C", trace, skip=2)

    trainer, module, data = fresh(accumulate_grad_batches=2, num_sanity_val_steps=1)
    trainer.fit(module, datamodule=data)
    found["fit"] = list(trace)

    with tempfile.TemporaryDirectory() as folder:
        trace.clear()
        path = str(Path(folder) / "a.ckpt")
        trainer.save_checkpoint(path)
        found["save_checkpoint"] = list(trace)
        trainer, module, data = fresh(limit_train_batches=1, limit_val_batches=0, max_epochs=2)
        trainer.fit(module, datamodule=data, ckpt_path=path)
        found["resume"] = list(trace)

    trainer, module, data = fresh(limit_val_batches=0)
    module.fails = True
    try:
        trainer.fit(module, datamodule=data)
    except ArithmeticError:
        found["exception"] = list(trace)

    for entry in ("validate", "test", "predict"):
        trainer, module, data = fresh()
        data.several = True
        getattr(trainer, entry)(module, datamodule=data)
        found[entry] = list(trace)
    return found


if __name__ == "__main__":
    import pytorch_lightning

    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    module_base, data_base = pytorch_lightning.LightningModule, pytorch_lightning.LightningDataModule
    found = program(pytorch_lightning, module_base, data_base, **quiet)
    # state_dict of the module itself is PyTorch's, and load_state_dict too: they are not hooks
    Path(sys.argv[1]).write_text(json.dumps({"version": pytorch_lightning.__version__, **found}, indent=1) + "\n")
