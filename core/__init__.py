"""Trivet trains PyTorch modules with a strategy, an accelerator and a precision that are chosen at run time.

Importing this package imports neither torch nor a plugin: every public name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "trivet":
    raise ImportError(
        f"this folder is the package 'trivet', but it was imported as {__name__!r}, which would make second copies of "
        "its modules. Install it (pip install -e .) and write `import trivet`."
    )

if TYPE_CHECKING:
    from .callbacks.callback import Callback as Callback
    from .callbacks.checkpoint import Checkpoint as Checkpoint
    from .capabilities import Plan as Plan
    from .capabilities import negotiate as negotiate
    from .commands.entry import cli as cli
    from .data.combined import CombinedLoader as CombinedLoader
    from .data.datamodule import DataModule as DataModule
    from .launch.alone import rank_zero as rank_zero
    from .launch.environment import Environment as Environment
    from .launch.launcher import Launcher as Launcher
    from .launch.world import World as World
    from .loggers.logger import Logger as Logger
    from .module import Module as Module
    from .plugins import Accelerator as Accelerator
    from .plugins import Precision as Precision
    from .plugins import Strategy as Strategy
    from .runtime import Runtime as Runtime
    from .seeding import seed_everything as seed_everything
    from .trainer import Trainer as Trainer

_PUBLIC = {
    "Accelerator": "plugins",
    "Callback": "callbacks.callback",
    "Checkpoint": "callbacks.checkpoint",
    "CombinedLoader": "data.combined",
    "DataModule": "data.datamodule",
    "Environment": "launch.environment",
    "Launcher": "launch.launcher",
    "Logger": "loggers.logger",
    "Module": "module",
    "Plan": "capabilities",
    "Precision": "plugins",
    "Runtime": "runtime",
    "Strategy": "plugins",
    "Trainer": "trainer",
    "World": "launch.world",
    "cli": "commands.entry",
    "negotiate": "capabilities",
    "rank_zero": "launch.alone",
    "seed_everything": "seeding",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trivet")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trivet' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trivet.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
