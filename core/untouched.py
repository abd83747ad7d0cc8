"""A forward that leaves no trace: for a rank that takes part on a batch which is not its own."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

CONTAINERS = (list, dict, set, deque, defaultdict)
OF_TORCH = frozenset(vars(nn.Module()))  # a module's parameters, submodules, hooks and mode


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Afterwards buffers and the user's own attributes are as before: numbers, tensors (so the state of torchmetrics),
    and what lists, dicts and sets hold. Parameters are not looked at; a step in evaluation changes none."""
    buffers = [(part, name, b, b.clone()) for part in module.modules() for name, b in part.named_buffers(recurse=False)]
    attributes = [(part, {name: _copy(v) for name, v in own(part)}, set(vars(part))) for part in module.modules()]
    yield
    for part, name, buffer, before in buffers:
        setattr(part, name, buffer.copy_(before))
    for part, saved, names in attributes:
        for name in vars(part).keys() - names:
            delattr(part, name)
        for name, (value, before) in saved.items():
            if before is not None:
                _restore(value, before)
            if vars(part).get(name) is not value:
                vars(part)[name] = value


def own(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a user's class put into a module's attributes; nothing of classes that are torch's own, which keep things
    there that a strategy exchanges."""
    if all(cls.__module__.partition(".")[0] in ("torch", "builtins") for cls in type(part).__mro__):
        return
    for name, value in vars(part).items():
        if name not in OF_TORCH and not isinstance(value, nn.Module):
            yield name, value


def _copy(value: Any) -> tuple[Any, Any]:
    """The value, and a copy of what it holds where it can be changed in place."""
    if isinstance(value, Tensor):
        return value, None if isinstance(value, nn.Parameter) else value.detach().clone()
    if type(value) in CONTAINERS:
        held = value.values() if isinstance(value, dict) else value
        if not any(isinstance(x, (nn.Parameter, nn.Module)) for x in held):
            return value, value.copy()
    return value, None


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, Tensor):
        value.detach().copy_(before)
        return
    value.clear()
    (value.extend if isinstance(value, (list, deque)) else value.update)(before)
