"""What `Module.configure_optimizers` returns: its forms, read and checked."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .engine import Engine


@dataclass
class Schedule:
    """A learning-rate scheduler and when to step it: every ``frequency`` updates or epochs."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True  # whether a metric that was never logged is an error; else the schedule waits for it
    reduce_on_plateau: bool = False  # whether ``step`` takes the metric, of a class that is not torch's

    @property
    def wants_metric(self) -> bool:
        return self.reduce_on_plateau or isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def read_optimizers(answer: Any, module: nn.Module) -> tuple[list[Optimizer], list[Schedule]]:
    """All forms that `Module.configure_optimizers` may return, as two lists."""
    name = f"{type(module).__name__}.configure_optimizers()"
    if answer is None:
        return [], []
    several = isinstance(answer, (list, tuple))
    if several and len(answer) == 2 and isinstance(answer[0], (list, tuple)):
        optimizers, schedulers = list(answer[0]), answer[1]
        schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
        return _only_optimizers(optimizers, name), [_schedule(s, name) for s in schedulers]
    optimizers, schedules = [], []
    for entry in answer if several else [answer]:
        if isinstance(entry, Mapping):
            _check_keys(entry, ("optimizer", "lr_scheduler", "monitor"), f"{name} returned a mapping", "'optimizer'")
            optimizers.append(entry["optimizer"])
            if entry.get("lr_scheduler") is not None:
                schedules.append(_schedule(entry["lr_scheduler"], name, entry.get("monitor")))
        else:
            optimizers.append(entry)
    return _only_optimizers(optimizers, name), schedules


def _check_keys(entry: Mapping[str, Any], known: Sequence[str], what: str, needed: str) -> None:
    """Refuse a mapping with a key that nobody reads, naming the nearest, or without the one that it needs."""
    unknown = next((key for key in entry if key not in known), None)
    if unknown is None and known[0] in entry:
        return
    near = get_close_matches(str(unknown), known, n=1)
    hint = f" Did you mean {near[0]!r} instead of {unknown!r}?" if near else ""
    raise ConfigurationError(
        f"{what} with the keys {sorted(map(str, entry))}; expected {needed} and, where wanted, "
        f"{', '.join(map(repr, known[1:]))}.{hint}"
    )


def _only_optimizers(found: Sequence[Any], name: str) -> list[Optimizer]:
    for item in found:
        if not isinstance(item, Optimizer):
            raise ConfigurationError(f"{name} returned {item!r} where a torch.optim.Optimizer was expected.")
    return list(found)


KEYS = ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau")
INTERVALS = {"epoch": "epoch", "update": "update", "step": "update"}


def _schedule(entry: Any, name: str, monitor: str | None = None) -> Schedule:
    if not isinstance(entry, Mapping):
        entry = {"scheduler": entry}
    _check_keys(entry, KEYS, f"{name} returned a scheduler's entry", "'scheduler'")
    interval, frequency = entry.get("interval", "epoch"), entry.get("frequency", 1)
    if interval not in INTERVALS:
        raise ConfigurationError(
            f"{name} returned a scheduler with 'interval': {interval!r}; allowed are 'epoch' and 'update' ('step')."
        )
    if type(frequency) is not int or frequency < 1:
        raise ConfigurationError(
            f"{name} returned a scheduler with 'frequency': {frequency!r}; expected a whole number from 1 up."
        )
    monitor, strict = entry.get("monitor") or monitor, entry.get("strict", True)
    options = {"strict": bool(strict), "reduce_on_plateau": bool(entry.get("reduce_on_plateau"))}
    schedule = Schedule(entry["scheduler"], INTERVALS[interval], frequency, monitor, entry.get("name"), **options)
    if not callable(getattr(schedule.scheduler, "step", None)):
        raise ConfigurationError(f"{name} returned {schedule.scheduler!r} as a scheduler; it has no step().")
    if schedule.wants_metric and schedule.monitor is None:
        raise ConfigurationError(
            f"{name} returned a {type(schedule.scheduler).__name__} without a metric to watch; add 'monitor': "
            "'val/loss' (a name that the module logs) to its entry."
        )
    return schedule


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def check_optimizers(engine: Engine, manual: bool, before: set[int], *, tells: bool) -> None:
    """Refuse optimizers that could not train the module as it is laid out; ``tells``: whether this rank warns.

    ``before`` are the ids of the parameters that the module had before it was laid out.
    """
    offers = engine.strategy.offers
    for optimizer in engine.optimizers:
        if needs_closure(optimizer) and not manual:
            raise ConfigurationError(
                f"{type(optimizer).__name__} evaluates the loss several times per step, which automatic optimization "
                "does not do. Set automatic_optimization = False and call optimizer.step(closure) in training_step, "
                "with strategy 'single', without clipping, accumulation or fp16."
            )
    name = f"{type(engine.module).__name__}.configure_optimizers()"
    if not engine.optimizers:
        _warn(
            tells,
            f"{name} returned no optimizer, so the fit changes no parameter. Return one: "
            "torch.optim.AdamW(self.parameters()). For a pass without training use trainer.validate or test.",
        )
        return
    if len(engine.optimizers) > 1 and not manual:
        raise ConfigurationError(
            f"configure_optimizers returned {len(engine.optimizers)} optimizers under automatic optimization, where "
            "one loss has one optimizer. Put the parameters into groups of one optimizer, or set "
            "automatic_optimization = False and step each of them yourself."
        )
    if manual and "manual_optimization" not in offers:
        raise ConfigurationError(
            f"strategy {type(engine.strategy).__name__!r} does not offer 'manual_optimization', which the module needs "
            "(automatic_optimization = False). Use --strategy ddp or single."
        )
    held = set(engine.module.parameters())
    given = [p for optimizer in engine.optimizers for group in optimizer.param_groups for p in group["params"]]
    none, old = not any(p in held for p in given), any(id(p) in before and p not in held for p in given)
    if none or old:
        what = "none of the module's parameters" if none else "parameters that the module has no more"
        raise ConfigurationError(
            f"configure_optimizers returned an optimizer over {what}: it was built before the "
            "strategy and the precision laid the module out. Build it from self.parameters() inside "
            "configure_optimizers."
        )
    if not any(p.requires_grad for p in given):
        _warn(
            tells,
            f"{name} returned an optimizer none of whose {len(given)} parameters requires a gradient, so nothing is "
            "trained until some do. Unfreeze them, requires_grad_(True), or give the optimizer those that do.",
        )


def _warn(tells: bool, text: str) -> None:
    if tells:
        warnings.warn(text, stacklevel=2)
