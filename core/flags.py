"""What the Trainer's flags mean, checked before any work is done."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import registry
from .callbacks.callback import Callback
from .callbacks.checkpoint import Checkpoint
from .errors import ConfigurationError
from .hooks import check_names, overrides
from .intervals import Interval, interval
from .limits import Limits
from .loggers.logger import Logger
from .plugins import Clip

if TYPE_CHECKING:
    from .launch.world import World
    from .module import Module

# What ``logger`` and ``callbacks`` may be: objects, names of installed plugins, or mappings of a name and options.
Loggers = bool | Logger | str | dict[str, Any] | list[Logger | str | dict[str, Any]] | None
LIMITS = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "val_check_interval", "check_val_every_n_epoch",
    "num_sanity_val_steps", "log_every_n_steps",
)  # fmt: skip
Callbacks = Callback | str | dict[str, Any] | list[Callback | str | dict[str, Any]] | None


def limits(
    *, max_epochs: int | None, min_epochs: int | None, max_steps: int | None, min_steps: int | None, max_time: Any,
    val_check_interval: Any, check_val_every_n_epoch: int | None, num_sanity_val_steps: int | None,
    log_every_n_steps: int | None,
) -> tuple[Limits, float | None]:  # fmt: skip
    """The limits of a run, checked, and the fraction of an epoch between validations, where it is one."""
    max_steps = -1 if max_steps is None else max_steps
    num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
    log_every = 50 if log_every_n_steps is None else log_every_n_steps
    for name, value, lowest in (
        ("max_epochs", max_epochs, -1), ("min_epochs", min_epochs, 0), ("max_steps", max_steps, -1),
        ("min_steps", min_steps, 0), ("check_val_every_n_epoch", check_val_every_n_epoch, 1),
        ("num_sanity_val_steps", num_sanity_val_steps, -1), ("log_every_n_steps", log_every, 1),
    ):  # fmt: skip
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < lowest):
            raise ConfigurationError(f"{name}={value!r}: expected a whole number from {lowest} up.")
    for low, least, high, most in (
        ("min_epochs", min_epochs, "max_epochs", max_epochs), ("min_steps", min_steps, "max_steps", max_steps),
    ):  # fmt: skip
        if least and most is not None and -1 < most < least:
            raise ConfigurationError(f"{low}={least} and {high}={most} contradict each other.")
    seconds = seconds_of(max_time)
    unlimited = max_epochs is None and max_steps == -1 and seconds is None
    if unlimited:
        max_epochs = 1000  # as `Trainer.fit` warns
    result = Limits(
        max_epochs=None if max_epochs in (None, -1) else max_epochs,
        min_epochs=min_epochs or 0,
        max_steps=None if max_steps == -1 else max_steps,
        min_steps=min_steps or 0,
        max_seconds=seconds,
        val_every_epochs=check_val_every_n_epoch or 1,
        val_across_epochs=check_val_every_n_epoch is None,
        sanity_batches=sys.maxsize if num_sanity_val_steps == -1 else num_sanity_val_steps,
        log_every=log_every,
        by_default=unlimited,
    )
    return with_validation(result, val_check_interval, check_val_every_n_epoch)


def with_validation(limits: Limits, value: Any, every_n_epoch: int | None) -> tuple[Limits, float | None]:
    """The limits with what ``val_check_interval`` says, and the fraction of an epoch where it is one below 1."""
    also = ("a number of batches", "a fraction in (0.0, 1.0]")
    across = every_n_epoch is None
    if value is None or (isinstance(value, float) and value == 1.0 and not across):
        if across:
            raise ConfigurationError(
                "check_val_every_n_epoch=None: then val_check_interval counts on from epoch to epoch. Give it, as a "
                "number of batches, '100 updates' or a time."
            )
        return limits, None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found = Interval(value, "epochs" if isinstance(value, float) else "batches")
        if found.unit == "epochs" and not 0.0 < value <= 1.0:
            raise ConfigurationError(f"val_check_interval={value!r}: a fraction lies in (0.0, 1.0].")
        if value < 1 and found.unit == "batches":
            raise ConfigurationError(f"val_check_interval={value!r}: a number of batches is at least 1.")
    else:
        found = interval("val_check_interval", value, "batches", "updates", "epochs", "seconds", also=also)
    if found.unit == "epochs":
        if across:
            raise ConfigurationError(
                f"val_check_interval={value!r} is a part of an epoch, and check_val_every_n_epoch=None counts on from "
                "epoch to epoch. Give a number of batches, '100 updates' or a time, or check_val_every_n_epoch=1."
            )
        if found.number < 1:
            return limits, found.number
        if found.number != found.count or (every_n_epoch or 1) > 1 < found.count:
            raise ConfigurationError(
                f"val_check_interval={value!r}: beyond one epoch expected whole epochs, and check_val_every_n_epoch=1."
            )
        return replace(limits, val_every_epochs=max(found.count, limits.val_every_epochs)), None
    if found.unit == "batches":
        return replace(limits, val_every_batches=found.count), None
    if found.unit == "updates":
        return replace(limits, val_every_updates=found.count), None
    return replace(limits, val_every_seconds=found.number), None


def warn_of_no_limit(limits: Limits) -> None:
    """Said when a fit begins, since other stages have no such limit."""
    if limits.by_default:
        warnings.warn(
            "neither max_epochs, max_steps nor max_time is given: training ends after 1000 epochs.", stacklevel=4
        )


def seconds_of(value: Any, name: str = "max_time") -> float | None:
    """``max_time``, or another argument, in seconds."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value <= 0:
            raise ConfigurationError(f"{name}={value!r}: expected a positive number of seconds.")
        return float(value)
    return interval(name, value, "seconds", also=("a number of seconds",)).number


def check_limit(name: str, value: int | float | None) -> int | float:
    """A number of batches, or a fraction where it is a float; all of them by default."""
    value = 1.0 if value is None else value
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    fine |= isinstance(value, float) and 0.0 <= value <= 1.0
    if not fine:
        raise ConfigurationError(f"{name}={value!r}: expected a number of batches (int) or a fraction from 0.0 to 1.0.")
    return value


def check_compile(value: Any) -> dict[str, Any] | None:
    """The options of `torch.compile`, None where it is not wanted."""
    if not isinstance(value, (bool, Mapping)):
        raise ConfigurationError(
            f"compile={value!r}: expected True, False or a mapping with options of torch.compile, such as "
            "{'mode': 'max-autotune'}."
        )
    return (dict(value) if isinstance(value, Mapping) else {}) if value is not False else None


def check_clip(value: float | None, algorithm: str) -> Clip | None:
    check_choice("gradient_clip_algorithm", algorithm, ("norm", "value"))
    if value is None or value == 0:
        if algorithm != "norm":
            raise ConfigurationError(
                f"gradient_clip_algorithm={algorithm!r} clips nothing: give gradient_clip_val, too."
            )
        return None
    if not isinstance(value, (int, float)) or value < 0:
        raise ConfigurationError(f"gradient_clip_val={value!r}: expected a positive number, or None for no clipping.")
    return Clip(float(value), algorithm)


def check_accumulation(accumulate: int, global_batch_size: int | None) -> None:
    if not isinstance(accumulate, int) or accumulate < 1:
        hint = (
            "; by epochs they are the callback GradientAccumulationScheduler's" if isinstance(accumulate, dict) else ""
        )
        raise ConfigurationError(f"accumulate_grad_batches={accumulate!r}: expected a whole number from 1 up{hint}.")
    if global_batch_size is not None and (type(global_batch_size) is not int or global_batch_size < 1):
        raise ConfigurationError(
            f"global_batch_size={global_batch_size!r}: expected a whole number from 1 up, or None."
        )
    if global_batch_size is not None and accumulate != 1:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} and accumulate_grad_batches={accumulate} were both given; the "
            "first replaces the second. Give one of them."
        )


def check_going_on(resume: Any, max_restarts: Any, min_devices: Any, world: World | None) -> None:
    """``resume``, ``max_restarts`` and ``min_devices``, as far as they do not depend on the devices."""
    check_resume(resume, None)
    if type(max_restarts) is not int or max_restarts < 0:
        raise ConfigurationError(f"max_restarts={max_restarts!r}: expected a whole number from 0 up.")
    if min_devices is not None and (type(min_devices) is not int or min_devices < 1):
        raise ConfigurationError(f"min_devices={min_devices!r}: expected a whole number from 1 up, or None.")
    given = f"max_restarts={max_restarts}" if max_restarts else f"min_devices={min_devices}" if min_devices else ""
    if world is not None and given:
        remedy = " Give torchrun --max-restarts N, and --nnodes MIN:MAX." if world.source == "torchrun" else ""
        raise ConfigurationError(
            f"{given}: {world.source} started the processes, so it has to start them again; Trivet then goes on from "
            f"the newest checkpoint.{remedy}"
        )


def check_nodes(max_restarts: int, min_devices: int | None, several: bool) -> None:
    """Where each node is launched by itself, nobody starts the processes of all again."""
    given = f"max_restarts={max_restarts}" if max_restarts else f"min_devices={min_devices}" if min_devices else ""
    if several and given:
        raise ConfigurationError(
            f"{given}: each node starts its own processes, and no node those of another. Start with torchrun "
            "--max-restarts N and --nnodes MIN:MAX on every node, or give the same command with resume='auto' again."
        )


def check_min_devices(min_devices: int | None, devices: int) -> None:
    if min_devices is not None and min_devices > devices:
        raise ConfigurationError(f"min_devices={min_devices} is more than devices={devices}.")


def check_resume(resume: Any, ckpt_path: Any) -> str | None:
    check_choice("resume", resume, (None, "auto"))
    if resume is not None and ckpt_path is not None:
        raise ConfigurationError(
            f"resume={resume!r} and ckpt_path={str(ckpt_path)!r} both say where to go on from. Give one of them."
        )
    return None if resume is None else str(resume)


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}.")


def make_loggers(logger: Loggers, root: Path) -> list[Logger]:
    """The loggers; a CSV logger where none is named. Those that ask for a ``save_dir`` get ``root``."""
    if logger is False:
        return []
    given: list[Any] = ["trivet:csv"] if logger is None or logger is True else _several(logger)
    return [_made("logger", one, Logger, save_dir=root) for one in given]


def make_callbacks(
    callbacks: Callbacks, *, checkpoint: bool, progress_bar: bool, summary: bool, fast: bool = False
) -> list[Callback]:
    """The callbacks, with a Checkpoint, a progress bar and a summary of the model where none is among them.

    A fast run saves nothing, and leaves out those that do.
    """
    found: list[Callback] = [_made("callback", one, Callback) for one in _several(callbacks)]
    for callback in found:
        check_names(callback, Callback)
    if fast:
        found = [callback for callback in found if not callback.saves]
    has_checkpoint = any(isinstance(callback, Checkpoint) for callback in found)
    if has_checkpoint and not checkpoint:
        raise ConfigurationError("a Checkpoint callback was given together with enable_checkpointing=False.")
    if checkpoint and not has_checkpoint:
        found.append(Checkpoint())
    if progress_bar:
        from .callbacks.progress import ProgressBar

        if not any(isinstance(callback, ProgressBar) for callback in found):
            found.insert(0, ProgressBar())
    if summary:
        from .callbacks.summary import ModelSummary

        if not any(isinstance(callback, ModelSummary) for callback in found):
            found.insert(0, ModelSummary())
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
