"""Job: what `fit` or `validate` was called with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .module import Module

if TYPE_CHECKING:
    from .data.datamodule import DataModule


@dataclass
class Job:
    """One call of `fit` or `validate`: what it was given, as it travels to worker processes."""

    stage: str
    module: Module
    train_dataloaders: Any = None
    val_dataloaders: Any = None
    datamodule: DataModule | None = None
    ckpt_path: str | None = None
    seed: int = 0
