"""Several loaders together."""

from __future__ import annotations

from typing import Any


def combined(loader: Any) -> Any:
    return loader


def evaluation_loaders(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]
