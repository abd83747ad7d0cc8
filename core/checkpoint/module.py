"""A module out of a checkpoint: made with the hyperparameters that are stored there, holding its weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CheckpointError
from . import directory
from .references import resolved

if TYPE_CHECKING:
    from ..module import Module

M = TypeVar("M", bound="Module")


def load_module(
    cls: type[M], path: str | Path, map_location: Any, strict: bool | None, overrides: Mapping[str, Any]
) -> M:
    """See `Module.load_from_checkpoint`."""
    stored = directory.read_user(path)
    parameters = inspect.signature(cls).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = {n: v for n, v in stored["hparams"].items() if n not in overrides and (takes_all or n in parameters)}
    values = {name: resolved(cls, name, value) for name, value in taken.items()} | dict(overrides)
    needed = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    missing = [name for name in needed if name not in values]
    if missing:
        raise CheckpointError(
            f"{cls.__name__} needs {missing}, and the checkpoint's hyperparameters are {sorted(stored['hparams'])}. "
            f"Pass {missing[0]}=... here, or call self.save_hyperparameters() in __init__."
        )
    module = cls(**values)
    module.configure_model()
    module.on_load_checkpoint(stored["user"])
    module.load_state_dict(directory.read_weights(path), strict=module.strict_loading if strict is None else strict)
    return module if map_location is None else module.to(map_location)
