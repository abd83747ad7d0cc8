"""Job: what `fit`, `validate`, `test` or `predict` was called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset

from .callbacks.callback import Callback
from .capabilities import Resolved, recheck
from .data.datamodule import DataModule
from .data.sharding import derive_accumulation
from .errors import ConfigurationError
from .hooks import check_names, overrides
from .module import Module

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass
class Job:
    """One call of an entry point: what it was given, as it travels to worker processes."""

    stage: str
    module: Module
    train_dataloaders: Any = None
    val_dataloaders: Any = None  # of a fit
    dataloaders: Any = None  # of the others
    datamodule: DataModule | None = None
    ckpt_path: str | None = None
    resume: str | None = None
    settled: bool = False  # whether the process that launches has decided where it begins,
    noted: bool = False  # and has noted that in the directory of the run
    seed: int = 0
    return_predictions: bool = False

    def check(self, trainer: Trainer, resolved: Resolved) -> None:
        """Raise ConfigurationError for a fit without data, or with other data than its flags need, as far as known; and
        for data that is given twice or in the wrong place."""
        given = (self.train_dataloaders, self.val_dataloaders, self.dataloaders)
        if any(isinstance(loader, DataModule) for loader in given):
            raise ConfigurationError(f"{self.stage} was given a data module as a loader. Write datamodule=...")
        if self.datamodule is not None and any(loader is not None and not callable(loader) for loader in given):
            raise ConfigurationError(
                f"{self.stage} was given a loader and the data module {type(self.datamodule).__name__}, and would have "
                "to leave out the data of one of them. Give one."
            )
        for loader in given:
            for one in loader if isinstance(loader, (list, tuple)) else [loader]:
                self._check_loader(one, alone=one is loader)
        check_names(self.module, Module)
        for callback in trainer.callbacks:
            check_names(callback, Callback)
        if self.datamodule is not None:
            check_names(self.datamodule, DataModule)
        if self.stage != "fit":
            return
        if not overrides(self.module, Module, "training_step"):
            raise ConfigurationError(
                f"{type(self.module).__name__} has no training_step(batch, batch_idx), which fit needs. Define it; it "
                "returns the loss."
            )
        if self.train_dataloaders is None:
            owner, base = (self.module, Module) if self.datamodule is None else (self.datamodule, DataModule)
            if not overrides(owner, base, "train_dataloader"):
                name = type(owner).__name__
                raise ConfigurationError(
                    f"fit was given no training data, and {name} has no train_dataloader(). Give a loader or a data "
                    "module (on the command line: --data package.module.Class), or define train_dataloader()."
                )
        batch_size = getattr(self.train_dataloaders, "batch_size", None)
        if trainer.global_batch_size is not None and isinstance(batch_size, int):
            count = derive_accumulation(trainer.global_batch_size, batch_size, resolved.plan.world_size)
            recheck(resolved, count)

    def _check_loader(self, loader: Any, *, alone: bool) -> None:
        if loader is None and not alone:
            raise ConfigurationError(f"{self.stage} was given a list of loaders with None among them. Leave it out.")
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise ConfigurationError(
                f"{self.stage} was given the data set {type(loader).__name__} itself, which has no batches. Give "
                "DataLoader(dataset, batch_size=...)."
            )
        iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__") or callable(loader)
        if isinstance(loader, (str, bytes)) or not (loader is None or iterable):
            raise ConfigurationError(
                f"{self.stage} was given {loader!r} as a loader. Expected a DataLoader or something else that can be "
                "iterated for batches."
            )
