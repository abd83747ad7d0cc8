"""Intervals and limits with a unit: "100 updates", "0.5 epochs", "10 min", "00:12:00:00", a timedelta."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .errors import ConfigurationError

UNITS = {
    "batch": "batches", "batches": "batches", "update": "updates", "updates": "updates", "step": "updates",
    "steps": "updates", "epoch": "epochs", "epochs": "epochs", "s": "s", "sec": "s", "second": "s", "seconds": "s",
    "min": "min", "minute": "min", "minutes": "min", "h": "h", "hour": "h", "hours": "h", "d": "d", "day": "d",
    "days": "d",
}  # fmt: skip
SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
TIME = ("'10 min', '2 h'", "'DD:HH:MM:SS'", "a timedelta", "a mapping such as {'hours': 2}")
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+)\s*")


@dataclass(frozen=True)
class Interval:
    """A number of one ``unit``: ``"batches"``, ``"updates"``, ``"epochs"`` or ``"seconds"``."""

    number: float
    unit: str

    @property
    def count(self) -> int:
        return int(self.number)


def interval(name: str, value: Any, *units: str, also: tuple[str, ...] = ()) -> Interval:
    """What a string, a timedelta or a mapping of ``timedelta``'s arguments says, in one of the ``units``.

    ``also`` are the other forms that the flag ``name`` takes, for the message. Raises ConfigurationError for anything
    else: numbers without a unit are the caller's, who knows what they count.
    """
    found = _read(value)
    if found is None or found.unit not in units:
        allowed = [*also, *(f"'100 {unit}'" for unit in units if unit in ("batches", "updates"))]
        allowed += ["'0.5 epochs'"] if "epochs" in units else []
        allowed += TIME if "seconds" in units else ()
        raise ConfigurationError(f"{name}={value!r}: allowed are {'; '.join(allowed)}.")
    if found.number <= 0:
        raise ConfigurationError(f"{name}={value!r}: expected more than 0.")
    if found.unit in ("batches", "updates") and found.number != found.count:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of {found.unit}.")
    return found


# Flags that count one thing: the unit of each, and which flag counts another.
COUNTED = {
    "max_epochs": "epochs", "min_epochs": "epochs", "check_val_every_n_epoch": "epochs",
    "reload_dataloaders_every_n_epochs": "epochs", "max_steps": "updates", "min_steps": "updates",
    "log_every_n_steps": "updates", "num_sanity_val_steps": "batches", "accumulate_grad_batches": "batches",
}  # fmt: skip
PARTS = ("overfit_batches", *(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")))
LIMITS = {"epochs": "epochs", "updates": "steps", "seconds": "time"}


def numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """A Trainer's arguments with numbers in the place of strings that say their unit: ``max_epochs="3 epochs"``."""
    found = dict(given)
    for name, value in given.items():
        if not isinstance(value, str):
            continue
        if name in COUNTED:
            found[name] = _counted(name, value, COUNTED[name])
        elif name in PARTS:
            part = interval(name, value, "batches", "epochs", also=("a number of batches", "a fraction (float)"))
            if part.unit == "epochs" and part.number > 1:
                raise ConfigurationError(f"{name}={value!r}: a limit is at most '1 epoch'.")
            found[name] = part.number if part.unit == "epochs" else part.count
    return found


def _counted(name: str, value: str, unit: str) -> int:
    """A whole number of the one unit that a flag has."""
    read = _read(value)
    if read is None or read.unit != unit or read.number != read.count:
        kind, _, what = name.partition("_")
        other = f"{kind}_{LIMITS[read.unit]}" if read is not None and read.unit in LIMITS else ""
        hint = (
            f" That is what {other} is for." if what in LIMITS.values() and other not in ("", name, "min_time") else ""
        )
        raise ConfigurationError(f"{name}={value!r}: allowed are a whole number of {unit}; '100 {unit}'.{hint}")
    return read.count


def _read(value: Any) -> Interval | None:
    if isinstance(value, timedelta):
        return Interval(value.total_seconds(), "seconds")
    if isinstance(value, Mapping):
        try:
            return Interval(timedelta(**value).total_seconds(), "seconds")
        except TypeError:
            return None
    if not isinstance(value, str):
        return None
    parts = value.strip().split(":")
    if len(parts) == 4 and all(part.strip().isdigit() for part in parts):
        days, hours, minutes, seconds = (int(part) for part in parts)
        return Interval(float(((days * 24 + hours) * 60 + minutes) * 60 + seconds), "seconds")
    match = _TEXT.fullmatch(value)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        return None
    number = float(match[1])
    return Interval(number * SECONDS[unit], "seconds") if unit in SECONDS else Interval(number, unit)
