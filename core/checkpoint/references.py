"""Classes and functions that a checkpoint names by import path, and which of them it may hand to a class.

A checkpoint may come from anywhere, and the code that it names would be called. So nothing is imported on its word, and
of what is imported already only those are handed over that are known to build or compute, or that the user's own code
allows.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, UnionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CheckpointError

KEY = "import_path"
_KINDS = {"torch.nn": nn.Module, "torch.optim": (Optimizer, LRScheduler)}
_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_HOLD = {list, tuple, set, dict, frozenset}


def is_reference(value: Any) -> bool:
    """Whether a stored hyperparameter stands for a class or a function."""
    return isinstance(value, Mapping) and set(value) == {KEY}


def resolved(cls: Callable[..., Any], name: str, value: Any) -> Any:
    """What a stored hyperparameter stands for, for the argument ``name`` of ``cls``; other values as they are.

    Raises CheckpointError for a class or function that it may not name. It may name, if it is imported already:

    - layers of ``torch.nn``, optimizers and schedules of ``torch.optim``, functions of ``torch.nn.functional``, and of
      ``torch`` where tensors have a method of that name;
    - the argument's default, and subclasses of X where it is annotated ``type[X]``;
    - modules (``nn.Module``) of the package that ``cls`` is in;
    - what ``torch.serialization.add_safe_globals`` was given.
    """
    if not is_reference(value):
        return value
    path = str(value[KEY])
    found = _look_up(path)
    if found is not None and _is_admitted(found, cls, name):
        return found
    what = "which is not imported here" if found is None else "which a checkpoint may not choose"
    raise CheckpointError(
        f"the hyperparameter {name!r} is {path}, {what}: nothing is imported or called on a checkpoint's word. Pass "
        f"{name}=..., or allow it: torch.serialization.add_safe_globals([{path.rpartition(':')[2] or path}])"
    )


def refuse_importing(cls: Callable[..., Any], name: str, value: Any) -> None:
    """Raise CheckpointError for a stored hyperparameter from which a command's parser would import something."""
    parameter = inspect.signature(cls).parameters.get(name)
    imports = parameter is not None and not _is_plain(_hint(cls, name))
    if imports and _names_something(value):
        raise CheckpointError(
            f"the hyperparameter {name!r} is {value!r}, which names code for an argument that takes more than plain "
            f"values: nothing is imported on a checkpoint's word. Give --model.{name} yourself."
        )


# ------------------------------------------------------------------------------------------------------------- looking


def _look_up(path: str) -> Any:
    """What is at ``module:name``, in modules that are imported already; None where that is not its own place."""
    where, _, name = path.partition(":")
    found: Any = sys.modules.get(where)
    for part in name.split(".") if name else ():
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
    own = (getattr(found, "__module__", None), getattr(found, "__qualname__", None))
    if isinstance(found, BuiltinFunctionType):
        return found if _is_arithmetic(found) else None
    return found if isinstance(found, (type, FunctionType)) and own == (where, name) else None


def _is_arithmetic(found: BuiltinFunctionType) -> bool:
    """Whether it is one of torch's own functions of tensors."""
    name = found.__name__
    return found is vars(nn.functional).get(name) or (found is vars(torch).get(name) and hasattr(torch.Tensor, name))


def _is_admitted(found: Any, cls: Callable[..., Any], name: str) -> bool:
    parameter = inspect.signature(cls).parameters.get(name)
    if parameter is not None and parameter.default is found:
        return True
    if any(found is (one[0] if isinstance(one, tuple) else one) for one in torch.serialization.get_safe_globals()):
        return True
    where = str(found.__module__)
    if isinstance(found, BuiltinFunctionType):
        return True  # `_look_up` found it
    if not isinstance(found, type):
        return where == "torch.nn.functional" and not found.__name__.startswith("_")
    if any(where.startswith(f"{package}.") and issubclass(found, kind) for package, kind in _KINDS.items()):  # type: ignore[arg-type]
        return True
    if issubclass(found, nn.Module) and where.partition(".")[0] == cls.__module__.partition(".")[0]:
        return True
    return any(issubclass(found, base) for base in _classes_taken(_hint(cls, name)))


def _hint(cls: Callable[..., Any], name: str) -> Any:
    try:
        function = cls
        if isinstance(cls, type):
            function = next(vars(kind)["__init__"] for kind in cls.__mro__ if "__init__" in vars(kind))
        return typing.get_type_hints(function).get(name, Any)
    except Exception:  # names that exist for a type checker only
        return Any


def _classes_taken(hint: Any) -> list[type]:
    """The X of each ``type[X]`` that an annotation admits."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return [one for part in typing.get_args(hint) for one in _classes_taken(part)]
    if typing.get_origin(hint) is not type:
        return []
    return [one for one in typing.get_args(hint) if isinstance(one, type) and one is not object]


def _is_plain(hint: Any) -> bool:
    """Whether an annotation admits values alone, and neither objects nor classes nor functions."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal or hint in _PLAIN or hint in _HOLD or hint is Ellipsis:
        return True
    if origin in (typing.Union, UnionType) or origin in _HOLD:
        return all(map(_is_plain, typing.get_args(hint)))
    return False


def _names_something(value: Any) -> bool:
    """Whether a value could be read as an import path, or as a class with arguments."""
    if isinstance(value, str):
        return "." in value or ":" in value
    if isinstance(value, Mapping):
        return "class_path" in value or any(map(_names_something, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_names_something, value))
