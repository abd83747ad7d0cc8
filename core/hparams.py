"""Hyperparameters: the arguments that a module or a data module was made with."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import FrameType, SimpleNamespace
from typing import Any

from torch import nn

from .errors import ConfigurationError


class HParams(SimpleNamespace):
    """Hyperparameters as attributes and as items."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def keys(self) -> list[str]:
        return list(vars(self))

    def values(self) -> list[Any]:
        return list(vars(self).values())

    def items(self) -> list[tuple[str, Any]]:
        return list(vars(self).items())

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self).get(name, default)

    def update(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)


def chosen(
    owner: object, frame: FrameType | None, given: tuple[Any, ...], ignore: str | Iterable[str]
) -> dict[str, Any]:
    """What ``save_hyperparameters(*given, ignore=)`` keeps, called from ``frame``.

    Nothing given: all arguments of the calling ``__init__`` and of those of subclasses that called it. Names: these.
    A mapping or a namespace: what it holds. Modules are left out: they are weights, not numbers.
    """
    ignored = {ignore} if isinstance(ignore, str) else set(ignore)
    if len(given) == 1 and isinstance(given[0], (Mapping, Namespace, SimpleNamespace)):
        held = given[0] if isinstance(given[0], Mapping) else vars(given[0])
        return {str(name): value for name, value in held.items() if name not in ignored}
    values = arguments(owner, frame)
    unknown = [name for name in given if name not in values]
    if unknown:
        raise ConfigurationError(
            f"save_hyperparameters: __init__ has no argument {unknown[0]!r}; it has {list(values)}."
        )
    return {
        name: value
        for name, value in values.items()
        if name not in ignored and (not given or name in given) and not isinstance(value, nn.Module)
    }


def arguments(owner: object, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the ``__init__`` in ``frame``, and of those of subclasses further out, which win."""
    values: dict[str, Any] = {}
    found = False
    while frame is not None and frame.f_code.co_name == "__init__":
        info = inspect.getargvalues(frame)
        first, *names = [*info.args, ""] if info.args else [""]
        if not first or info.locals.get(first) is not owner:
            break
        found = True
        mine = {name: info.locals[name] for name in (*names, *_keyword_only(frame)) if name in info.locals}
        mine.update(info.locals.get(info.keywords or "", {}))
        values.update(mine)
        frame = frame.f_back
    if not found:
        what = "module" if isinstance(owner, nn.Module) else "object"
        raise ConfigurationError(f"save_hyperparameters() must be called in the {what}'s own __init__.")
    return values


def _keyword_only(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
