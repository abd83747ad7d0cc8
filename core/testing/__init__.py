"""The conformance kit: whether a plugin trains like a reference written by hand, wherever it is admitted.

A plugin author subclasses `StrategySuite`, `AcceleratorSuite` or `PrecisionSuite` in a test file, or writes none and
runs ``pytest --trivet-strategy NAME``. Importing this package imports neither torch nor pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .suites import AcceleratorSuite as AcceleratorSuite
    from .suites import PrecisionSuite as PrecisionSuite
    from .suites import StrategySuite as StrategySuite
    from .tolerance import Tolerance as Tolerance

_EXPORTS = {
    "AcceleratorSuite": "suites",
    "PrecisionSuite": "suites",
    "StrategySuite": "suites",
    "Tolerance": "tolerance",
}

__all__ = ["AcceleratorSuite", "PrecisionSuite", "StrategySuite", "Tolerance"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError(
            f"trivet.testing.{name} needs pytest, which is not installed. Install it with: pip install "
            "'trivet[testing]'",
            name="pytest",
        ) from error


def __dir__() -> list[str]:
    return list(__all__)
