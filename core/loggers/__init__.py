"""Where the numbers of a run go. The names below are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .csv import CSVLogger as CSVLogger
    from .logger import Logger as Logger
    from .tensorboard import TensorBoardLogger as TensorBoardLogger

_PUBLIC = {"CSVLogger": "csv", "Logger": "logger", "TensorBoardLogger": "tensorboard"}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trivet.loggers' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
