"""Callbacks and loggers whose defaults or results look otherwise in Lightning."""

from __future__ import annotations

import os
from typing import Any

from ...callbacks import early_stopping, model_checkpoint
from ...loggers import csv, tensorboard
from .scalar import Scalar


class ModelCheckpoint(model_checkpoint.ModelCheckpoint):
    """Trivet's, with scores that can be asked like tensors."""

    @property
    def best_model_score(self) -> Scalar | None:
        score = super().best_model_score
        return None if score is None else Scalar(score)


class EarlyStopping(early_stopping.EarlyStopping):
    """Trivet's, with a score that can be asked like a tensor."""

    @property
    def best_score(self) -> Scalar:
        return self._best_score

    @best_score.setter
    def best_score(self, value: float) -> None:
        self._best_score = Scalar(value)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best_score": self.best_score.item()}  # checkpoints take plain numbers only


class CSVLogger(csv.CSVLogger):
    """Trivet's, under ``lightning_logs`` by default."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)


class TensorBoardLogger(tensorboard.TensorBoardLogger):
    """Trivet's, under ``lightning_logs`` by default."""

    def __init__(self, save_dir: str | os.PathLike[str], name: str | None = "lightning_logs", **options: Any) -> None:
        super().__init__(save_dir, name, **options)
