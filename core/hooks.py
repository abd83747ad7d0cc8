"""Hooks, compiled once per run into tuples of the overridden ones: a hook that nobody wrote costs one truth test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .callbacks.callback import Callback
from .errors import ConfigurationError
from .module import Module

if TYPE_CHECKING:
    from .trainer import Trainer

Table = tuple[Callable[..., Any], ...]


# With what a hook or a step may be written shorter than it is called: without the number of the batch.
SHORTER = {"training_step": 1, "validation_step": 1, "test_step": 1, "predict_step": 1}
# What is told the number of the loader where there are several.
OF_SEVERAL = frozenset(
    what for kind in ("validation", "test", "predict")
    for what in (f"{kind}_step", f"on_{kind}_batch_start", f"on_{kind}_batch_end")
)  # fmt: skip
# Methods that Lightning once had or has and that nobody calls here, with what to write instead.
GONE = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "training_step_end": "training_step",
    "configure_sharded_model": "configure_model",
}


def names_of(base: type) -> list[str]:
    """The hook names that a base class declares."""
    return [name for name in dir(base) if name.startswith("on_") or name in ("setup", "teardown")]


def overrides(owner: object, base: type, name: str) -> bool:
    """Whether an object has its own version of a base class's method, by subclass or by instance attribute."""
    return name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name, None)


def check_names(owner: object, base: type) -> None:
    """Refuse a method named ``on_...`` that is no hook and would never be called, and one that cannot be called."""
    import difflib

    known = names_of(base)
    for name in dir(type(owner)):
        method = getattr(type(owner), name)
        if name in GONE and callable(method):
            raise ConfigurationError(f"{type(owner).__name__}.{name} is never called. Override {GONE[name]}.")
        if name.startswith("on_") and name not in known and callable(method):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"{type(owner).__name__}.{name} is named like a hook, but no hook has that name, so it would never be "
                f"called.{hint} Rename it if it is a method of your own."
            )
    steps = (*SHORTER, "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")
    for name in (*known, *steps, "transfer_batch_to_device"):
        if hasattr(base, name) and overrides(owner, base, name):
            parameters = list(inspect.signature(getattr(base, name)).parameters.values())[1:]
            needed = [p.name for p in parameters if p.name != "dataloader_idx" or p.default is p.empty]
            counts = [len(needed), SHORTER.get(name, -1)]
            if name in OF_SEVERAL:  # one that has to be told of which loader a batch is: see `check_loaders`
                counts.append(len(needed) + 1)
            if not any(takes(getattr(owner, name), count) for count in counts):
                raise ConfigurationError(
                    f"{type(owner).__name__}.{name}{inspect.signature(getattr(owner, name))} cannot be called with "
                    f"({', '.join(needed)}), as it is. Give it these parameters."
                )


def takes(method: Callable[..., Any] | None, count: int) -> bool:
    """Whether a method can be called with so many positional arguments; one that is not there is not in the way."""
    if method is None:
        return True
    try:
        inspect.signature(method).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return count >= 0


def takes_only(method: Callable[..., Any] | None, count: int) -> bool:
    """Whether a method can be called with so many positional arguments, and not with one more."""
    return takes(method, count) and not takes(method, count + 1)


def check_loaders(kind: str, loaders: int, module: Module, callbacks: Sequence[Callback]) -> None:
    """Refuse a step or a batch hook that cannot be told which of several loaders a batch is of, and one that has to be
    told so where there is one."""
    for owner, base in ((module, Module), *((callback, Callback) for callback in callbacks)):
        for name, count in ((f"{kind}_step", 3), (f"on_{kind}_batch_start", 3), (f"on_{kind}_batch_end", 4)):
            if not hasattr(base, name) or not overrides(owner, base, name):
                continue
            method, needed = getattr(owner, name), count if base is Module else count + 2
            if loaders == 1 and not takes(method, needed - 1) and not takes(method, SHORTER.get(name, -1)):
                raise ConfigurationError(
                    f"{type(owner).__name__}.{name} has to be told dataloader_idx, and there is one {kind} loader. "
                    "Write dataloader_idx=0."
                )
            if loaders > 1 and not takes(method, needed):
                raise ConfigurationError(
                    f"{type(owner).__name__}.{name} gets batches of several loaders, but has no parameter "
                    "dataloader_idx. Add it as the last one, or give one loader."
                )


class Hooks:
    """One attribute per hook: the bound methods to call, callbacks in list order before the module.

    Savers (callbacks with ``saves = True``) come last, so that they see what the others did. At the end of an epoch
    those that watch its metrics (``watches = True``) come right before them.
    """

    def __init__(self, trainer: Trainer, module: Module, callbacks: Sequence[Callback]) -> None:
        module_hooks = set(names_of(Module))
        for name in dict.fromkeys((*names_of(Callback), *module_hooks)):
            first: list[Callable[..., Any]] = []
            last: list[Callable[..., Any]] = []
            watching: list[Callable[..., Any]] = []
            if hasattr(Callback, name):
                for callback in callbacks:
                    if overrides(callback, Callback, name):
                        bound = partial(getattr(callback, name), trainer, module)
                        watches = callback.watches and name == "on_train_epoch_end"
                        (last if callback.saves else watching if watches else first).append(bound)
            middle = [getattr(module, name)] if name in module_hooks and overrides(module, Module, name) else []
            if name == "on_train_epoch_end":  # savers come after the epoch's metrics are known and the epoch is counted
                self.savers_on_train_epoch_end: Table = (*watching, *last)
                last = []
            setattr(self, name, (*first, *middle, *last))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Table: ...


def call(table: Table, *args: Any) -> None:
    """Call every hook of a table."""
    for hook in table:
        hook(*args)
