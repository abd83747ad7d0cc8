"""``--optimizer`` and ``--lr_scheduler``: optimizers that the command line gives to a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..configured import read_optimizers
from ..errors import ConfigurationError
from ..hooks import overrides
from ..module import Module

if TYPE_CHECKING:
    from torch.optim import Optimizer

ENTRY = ("interval", "frequency", "monitor")  # options of the schedule rather than of the scheduler's class


@dataclass(frozen=True)
class Part:
    """A class and what it is made with, beside its first argument."""

    cls: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return getattr(self.cls, "__name__", str(self.cls))


def replace_optimizers(module: Module, optimizer: Part | None, scheduler: Part | None) -> None:
    """Let the module be trained with these in place of its own; with a scheduler alone, on its own optimizer.

    Raises ConfigurationError for a scheduler alone where the module has no configure_optimizers, and for one that
    watches a metric and is not told which.
    """
    if optimizer is None and scheduler is None:
        return
    if scheduler is not None and _lacks_metric(scheduler):
        raise ConfigurationError(
            f"--lr_scheduler {scheduler.name} watches a metric, and none was named. Add --lr_scheduler.monitor NAME, "
            "the name of a metric that the module logs, such as val/loss."
        )
    if optimizer is None and not overrides(module, Module, "configure_optimizers"):
        raise ConfigurationError(
            f"--lr_scheduler: {type(module).__name__} has no configure_optimizers(). Add --optimizer NAME, too."
        )
    own = module.configure_optimizers
    # an attribute of this one object, which travels to worker processes with it
    module.configure_optimizers = partial(configure, module, own, optimizer, scheduler)  # type: ignore[method-assign]


def configure(module: Module, own: Callable[[], Any], optimizer: Part | None, scheduler: Part | None) -> Any:
    """What stands for `Module.configure_optimizers`."""
    made = _made(module, own, optimizer)
    if scheduler is None:
        return made
    options, taken = dict(scheduler.options), inspect.signature(scheduler.cls).parameters
    accepted = {name: options.pop(name) for name in ENTRY if name in options and name not in taken}
    if "monitor" in taken:
        accepted["monitor"] = options["monitor"]
    return {"optimizer": made, "lr_scheduler": {"scheduler": _called(scheduler, made, options), **accepted}}


def _lacks_metric(scheduler: Part) -> bool:
    watches = isinstance(scheduler.cls, type) and issubclass(scheduler.cls, ReduceLROnPlateau)
    return watches and scheduler.options.get("monitor") is None


def _called(part: Part, first: Any, options: Mapping[str, Any]) -> Any:
    try:
        return part.cls(first, **options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{part.name} refused its options {dict(options)!r}: {error}") from error


def _made(module: Module, own: Callable[[], Any], optimizer: Part | None) -> Optimizer:
    if optimizer is not None:
        params = [param for param in module.parameters() if param.requires_grad]
        if not params:
            raise ConfigurationError(f"{type(module).__name__} has no parameter that can be trained.")
        made: Optimizer = _called(optimizer, params, optimizer.options)
        return made
    optimizers, _ = read_optimizers(own(), module)
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"--lr_scheduler is for one optimizer, and {type(module).__name__}.configure_optimizers() returns "
            f"{len(optimizers)}. Add --optimizer CLASS, or make the scheduler there."
        )
    return optimizers[0]
