"""DataModule: data as an object of its own, with Lightning's hooks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from ..errors import ConfigurationError
from ..hparams import HParams, chosen
from .transfer import to_device

if TYPE_CHECKING:
    from typing import Self

    import torch


class DataModule:
    """Prepares data and makes loaders; given as ``fit(module, datamodule=...)``.

    Every loader method may return whatever a loader argument of ``fit`` may be. Order of calls: `prepare_data`,
    `setup`, the loader methods, `teardown`. ``trainer`` is set while the Trainer holds the DataModule.
    """

    trainer: Any = None
    prepare_data_per_node: bool = True  # False: `prepare_data` runs on one machine only, which shares its files

    def __init__(self) -> None:
        super().__init__()
        from ..hooks import check_names

        check_names(self, DataModule)

    @property
    def hparams(self) -> HParams:
        """What `save_hyperparameters` kept."""
        found: HParams = vars(self).setdefault("_hparams", HParams())  # a subclass need not call super().__init__()
        return found

    def save_hyperparameters(self, *given: Any, ignore: str | Iterable[str] = (), logger: bool = True) -> None:
        """As `Module.save_hyperparameters`; ``logger`` is accepted because Lightning has it."""
        frame = inspect.currentframe()
        self.hparams.update(chosen(self, frame.f_back if frame else None, given, ignore))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}

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
        """A data module over data sets: a list or mapping of them for several loaders; training data are shuffled.
        ``options`` are the class's own arguments."""

        def loaders(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, (list, tuple)):
                return [loaders(one, shuffle) for one in dataset]
            if isinstance(dataset, Mapping):
                return {name: loaders(one, shuffle) for name, one in dataset.items()}
            shuffle = shuffle and not isinstance(dataset, IterableDataset)
            return DataLoader(dataset, batch_size, shuffle=shuffle, num_workers=num_workers)

        found = cls(**options)
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for name, dataset in given.items():
            if dataset is not None:
                setattr(found, f"{name}_dataloader", partial(loaders, dataset, name == "train"))
        return found

    def prepare_data(self) -> None:
        """Download, unpack: called on one process per node, before `setup` on any. Set no attribute here."""

    def setup(self, stage: str) -> None:
        """Make the data sets. Called on every process; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called on every process at the end of the stage, also after an exception."""

    def train_dataloader(self) -> Any:
        """The training data: a loader or any iterable of batches. Called on every process."""
        raise ConfigurationError(f"{type(self).__name__} has no train_dataloader; fit needs one.")

    def val_dataloader(self) -> Any:
        """The validation data, a loader or a list of loaders, or None for none."""
        return None

    def test_dataloader(self) -> Any:
        """The test data, a loader or a list of loaders, or None for none."""
        return None

    def predict_dataloader(self) -> Any:
        """The data to predict on, a loader or a list of loaders, or None for none."""
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what shall be moved to the device; overridden here, it replaces the module's method of that name."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on ``device``; likewise."""
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what the step shall get, for instance augmented on the device; likewise."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint shall hold of this object, as plain data. The position in the data is not your concern."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of `state_dict`; called after `setup`."""

    def on_exception(self, exception: BaseException) -> None:
        """Called on the process in which training raised, before `teardown`."""
