"""LambdaCallback: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError
from .callback import Callback


class LambdaCallback(Callback):
    """Calls functions in hooks: ``LambdaCallback(on_train_end=lambda trainer, module: ...)``.

    Args:
        hooks: functions by the name of their hook, with the hook's arguments. Functions that are to run in worker
            processes travel there by cloudpickle.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        known = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
        for name, function in hooks.items():
            if name not in known:
                raise ConfigurationError(f"LambdaCallback: no hook is named {name!r}; there are {', '.join(known)}.")
            if function is not None:
                setattr(self, name, function)
