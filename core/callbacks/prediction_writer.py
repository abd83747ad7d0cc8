"""PredictionWriter: predictions to files, as they are made, with the indices of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer

INTERVALS = ("batch", "epoch", "batch_and_epoch")


class PredictionWriter(Callback):
    """Writes what `Trainer.predict` makes, on the rank that made it; override a method to write in another way.

    With ``return_predictions=False`` nothing else keeps predictions, so they may be larger than memory. By itself it
    writes one file per batch into ``output_dir``, for `read` to give back in the order of the data.

    Args:
        write_interval: ``"batch"`` after each, ``"epoch"`` at the end, or ``"batch_and_epoch"``.
        output_dir: where the files go, on a file system that all ranks share.
    """

    def __init__(self, write_interval: str = "batch", output_dir: str | Path | None = None) -> None:
        if write_interval not in INTERVALS:
            raise ConfigurationError(
                f"write_interval={write_interval!r}: allowed are {', '.join(map(repr, INTERVALS))}."
            )
        self.write_interval = write_interval
        self.output_dir = None if output_dir is None else Path(output_dir)

    @property
    def at_end(self) -> bool:
        """Whether predictions are kept for `write_on_epoch_end`."""
        return self.write_interval != "batch"

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        prediction: Any,
        batch_indices: Sequence[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write one batch; ``batch_indices`` are those of its samples, None where the loader is not read by index."""
        if self.output_dir is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no output_dir and does not override write_on_batch_end. Give one or do so."
            )
        self.output_dir.mkdir(parents=True, exist_ok=True)
        path = self.output_dir / f"{dataloader_idx:03d}-{batch_idx:09d}.pt"
        torch.save({"indices": batch_indices, "prediction": prediction}, path)

    def write_on_epoch_end(
        self, trainer: Trainer, module: Module, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all that this rank predicted: by batch, and by loader before that where there are several."""
        own = trainer.own_predictions
        for dataloader_idx, loader in enumerate(own):
            for batch_idx, prediction, indices in loader:
                self.write_on_batch_end(trainer, module, prediction, indices, None, batch_idx, dataloader_idx)

    @staticmethod
    def read(output_dir: str | Path) -> Iterator[dict[str, Any]]:
        """What was written, in the order of the loaders and their batches: ``indices`` and ``prediction`` of each."""
        for path in sorted(Path(output_dir).glob("*-*.pt")):
            yield torch.load(path, weights_only=False)  # our own files

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.write_interval != "epoch":
            indices = trainer.batch_indices
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if not self.at_end:
            return
        predictions = [[prediction for _, prediction, _ in loader] for loader in trainer.own_predictions]
        indices = [[indices for *_, indices in loader] for loader in trainer.own_predictions]
        one = len(predictions) == 1
        self.write_on_epoch_end(trainer, module, predictions[0] if one else predictions, indices)
