"""LightningDataModule: Trivet's DataModule, with hyperparameters and `from_datasets`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from ...data.datamodule import DataModule
from ...hparams import HParams, chosen

if TYPE_CHECKING:
    from typing import Self


class LightningDataModule(DataModule):
    """Prepares data and makes loaders; see `trivet.DataModule`."""

    @property
    def hparams(self) -> HParams:
        """What `save_hyperparameters` kept."""
        found: HParams = self.__dict__.setdefault("_hparams", HParams())
        return found

    def save_hyperparameters(self, *given: Any, ignore: str | Iterable[str] = (), logger: bool = True) -> None:
        """Keep the arguments of the calling ``__init__`` in `hparams`."""
        frame = inspect.currentframe()
        self.hparams.update(chosen(self, frame.f_back if frame else None, given, ignore))

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **options: Any,
    ) -> Self:
        """A data module whose loaders read these data sets, each one or a list of them; training data is shuffled."""

        def loaders(given: Any, shuffle: bool) -> Any:
            if isinstance(given, (list, tuple)):
                return [loaders(one, shuffle) for one in given]
            shuffle = shuffle and not isinstance(given, IterableDataset)
            return DataLoader(given, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)

        module = cls(**options)
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for kind, dataset in datasets.items():
            if dataset is not None:  # an attribute of this object alone, found before the method of its class
                made = loaders(dataset, kind == "train")
                setattr(module, f"{kind}_dataloader", _Given(made))
        return module


class _Given:
    """A method that returns what it was made with; unlike a lambda it travels to worker processes."""

    def __init__(self, loaders: Any) -> None:
        self.loaders = loaders

    def __call__(self) -> Any:
        return self.loaders
