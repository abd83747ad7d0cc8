"""Hooks, compiled once per run into tuples of the overridden ones: a hook that nobody wrote costs one truth test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .callbacks.callback import Callback
from .errors import ConfigurationError
from .module import Module

if TYPE_CHECKING:
    from .trainer import Trainer

Table = tuple[Callable[..., Any], ...]


def names_of(base: type) -> list[str]:
    """The hook names that a base class declares."""
    return [name for name in vars(base) if name.startswith("on_") or name in ("setup", "teardown")]


def overrides(owner: object, base: type, name: str) -> bool:
    """Whether an object has its own version of a base class's method, by subclass or by instance attribute."""
    return name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name, None)


def check_names(owner: object, base: type) -> None:
    """Refuse a method named ``on_...`` that is no hook: it would never be called."""
    import difflib

    known = names_of(base)
    for name in dir(type(owner)):
        if name.startswith("on_") and name not in known and callable(getattr(type(owner), name)):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(
                f"{type(owner).__name__}.{name} is named like a hook, but no hook has that name, so it would never be "
                f"called.{hint} Rename it if it is a method of your own."
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
            if name in vars(Callback):
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
