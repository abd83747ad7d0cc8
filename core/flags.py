"""What the Trainer's flags mean, checked before any work is done."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import registry
from .callbacks.callback import Callback
from .callbacks.checkpoint import Checkpoint
from .errors import ConfigurationError
from .hooks import overrides
from .loggers.logger import Logger
from .plugins import Clip
from .run import Limits

if TYPE_CHECKING:
    from .module import Module

# What ``logger`` and ``callbacks`` may be: objects, names of installed plugins, or mappings of a name and options.
Loggers = bool | Logger | str | dict[str, Any] | list[Logger | str | dict[str, Any]] | None
Callbacks = Callback | str | dict[str, Any] | list[Callback | str | dict[str, Any]] | None


def limits(
    *, max_epochs: int | None, min_epochs: int | None, max_steps: int, min_steps: int | None,
    max_time: str | float | timedelta | None, val_check_interval: int | float, check_val_every_n_epoch: int,
    num_sanity_val_steps: int, log_every_n_steps: int,
) -> Limits:  # fmt: skip
    """The limits of a run, checked. Without any limit: 1000 epochs, as a warning says."""
    for name, value, lowest in (
        ("max_epochs", max_epochs, -1), ("min_epochs", min_epochs, 0), ("max_steps", max_steps, -1),
        ("min_steps", min_steps, 0), ("check_val_every_n_epoch", check_val_every_n_epoch, 1),
        ("num_sanity_val_steps", num_sanity_val_steps, -1), ("log_every_n_steps", log_every_n_steps, 1),
    ):  # fmt: skip
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < lowest):
            raise ConfigurationError(f"{name}={value!r}: expected a whole number from {lowest} up.")
    if isinstance(val_check_interval, float) and not 0.0 < val_check_interval <= 1.0:
        raise ConfigurationError(f"val_check_interval={val_check_interval!r}: a fraction lies in (0.0, 1.0].")
    if isinstance(val_check_interval, int) and val_check_interval < 1:
        raise ConfigurationError(f"val_check_interval={val_check_interval!r}: a number of batches is at least 1.")
    seconds = seconds_of(max_time)
    if max_epochs is None and max_steps == -1 and seconds is None:
        warnings.warn(
            "neither max_epochs, max_steps nor max_time is given: training ends after 1000 epochs.", stacklevel=3
        )
        max_epochs = 1000
    return Limits(
        max_epochs=None if max_epochs in (None, -1) else max_epochs,
        min_epochs=min_epochs or 0,
        max_steps=None if max_steps == -1 else max_steps,
        min_steps=min_steps or 0,
        max_seconds=seconds,
        val_every_epochs=check_val_every_n_epoch,
        sanity_batches=sys.maxsize if num_sanity_val_steps == -1 else num_sanity_val_steps,
        log_every=log_every_n_steps,
    )


def seconds_of(value: str | float | timedelta | None) -> float | None:
    """``max_time`` in seconds."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
            raise ConfigurationError(f"max_time={value!r}: expected 'DD:HH:MM:SS', a timedelta or seconds.")
        days, hours, minutes, rest = (int(part) for part in parts)
        return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if value <= 0:
        raise ConfigurationError(f"max_time={value!r}: expected a positive number of seconds.")
    return float(value)


def check_limit(name: str, value: int | float) -> int | float:
    """A number of batches, or a fraction where it is a float."""
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    fine |= isinstance(value, float) and 0.0 <= value <= 1.0
    if not fine:
        raise ConfigurationError(f"{name}={value!r}: expected a number of batches (int) or a fraction from 0.0 to 1.0.")
    return value


def check_clip(value: float | None, algorithm: str) -> Clip | None:
    check_choice("gradient_clip_algorithm", algorithm, ("norm", "value"))
    if value is None or value == 0:
        return None
    if value < 0:
        raise ConfigurationError(f"gradient_clip_val={value!r}: expected a positive number, or None for no clipping.")
    return Clip(float(value), algorithm)


def check_accumulation(accumulate: int, global_batch_size: int | None) -> None:
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigurationError(f"accumulate_grad_batches={accumulate!r}: expected a whole number from 1 up.")
    if global_batch_size is not None and accumulate != 1:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} and accumulate_grad_batches={accumulate} were both given; the "
            "first replaces the second. Give one of them."
        )


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}.")


def make_loggers(logger: Loggers, root: Path) -> list[Logger]:
    """The loggers; a CSV logger where none is named. Those that ask for a ``save_dir`` get ``root``."""
    if logger is False:
        return []
    given: list[Any] = ["trivet:csv"] if logger is None or logger is True else _several(logger)
    return [_made("logger", one, Logger, save_dir=root) for one in given]


def make_callbacks(callbacks: Callbacks, *, checkpoint: bool, progress_bar: bool) -> list[Callback]:
    """The callbacks, with a Checkpoint and a progress bar where none is among them; savers last."""
    found: list[Callback] = [_made("callback", one, Callback) for one in _several(callbacks)]
    has_checkpoint = any(isinstance(callback, Checkpoint) for callback in found)
    if has_checkpoint and not checkpoint:
        raise ConfigurationError("a Checkpoint callback was given together with enable_checkpointing=False.")
    if checkpoint and not has_checkpoint:
        found.append(Checkpoint())
    if progress_bar:
        from .callbacks.progress import ProgressBar

        if not any(isinstance(callback, ProgressBar) for callback in found):
            found.insert(0, ProgressBar())
    return different(found)


def different(found: list[Callback]) -> list[Callback]:
    """The callbacks; those that keep state have different keys."""
    keys = [callback.state_key for callback in found if overrides(callback, Callback, "state_dict")]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"two callbacks have the state_key {twice!r}; override state_key in one of them.")
    return found


def with_those_of(module: Module, callbacks: list[Callback]) -> list[Callback]:
    """The callbacks with those that the module configures, each of which replaces those of its own class."""
    own = [_made("callback", one, Callback) for one in _several(module.configure_callbacks())]
    if not own:
        return callbacks
    kinds = {type(callback) for callback in own}
    return different([callback for callback in callbacks if type(callback) not in kinds] + own)


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _made(kind: str, given: Any, base: type[Any], **defaults: Any) -> Any:
    """A logger or callback: the object that was given, or what its name or mapping stands for."""
    if isinstance(given, base):
        return given
    if isinstance(given, str) and "." in given and ":" not in given:  # an import path
        given = {"class_path": given}
    if not isinstance(given, (str, Mapping)):
        raise ConfigurationError(
            f"{kind}: expected a trivet.{base.__name__}, a name (see `trivet plugins {kind}`) or a mapping with 'name' "
            f"and options, got {given!r}."
        )
    return registry.make(kind, given, defaults=defaults).plugin
