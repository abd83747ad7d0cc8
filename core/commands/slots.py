"""Slots: what a command line fills by naming a class or a plugin, as ``--strategy ddp`` or ``--model pkg.Net`` do.

Those of the Trainer are its arguments that have the name of a kind of plugin, read off its signature.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigurationError, PluginNotFound
from ..plugin_checks import base_class
from ..registry import AUTO, GROUPS, canonical, find, load

SEVERAL = frozenset({"logger", "callback"})  # the kinds of which a Trainer takes several
FORMERLY = ("lightning.pytorch.", "pytorch_lightning.")  # files that were written for Lightning name its own classes


@dataclass(frozen=True)
class Slot:
    """One key that selects.

    ``kind`` is the kind of plugin, or "" for a class. ``base`` is what the class derives from, or its import path,
    "" for a plugin's own. ``selector`` is the key of the selecting value in a mapping. ``skip`` are the first arguments
    of the class that are not the user's to give, ``filled`` those that are filled in where the user does not. ``spell``
    brings a script's own spelling of a value into ours. ``default`` is the plugin that fills it where nobody says.
    """

    key: str
    kind: str = ""
    base: str | type[Any] = ""
    several: bool = False
    skip: int = 0
    filled: frozenset[str] = frozenset()
    help: str = ""
    spell: Callable[[Any], Any] | None = None
    default: str = ""

    @property
    def selector(self) -> str:
        return "name" if self.kind and not self.several else "class_path"

    @property
    def what(self) -> str:
        """What a message calls one."""
        return self.kind or self.key

    def base_class(self) -> type[Any]:
        if not self.base:
            return base_class(self.kind)
        if isinstance(self.base, type):
            return self.base
        module, _, name = self.base.rpartition(".")
        found: type[Any] = getattr(importlib.import_module(module), name)
        return found


CLASSES = (
    Slot(
        "model",
        base="trivet.module.Module",
        help="the import path of a trivet.Module; modules of the current directory are found",
    ),
    Slot("data", base="trivet.data.datamodule.DataModule", help="the import path of a trivet.DataModule"),
    Slot(
        "optimizer",
        base="torch.optim.Optimizer",
        skip=1,
        help="in place of the model's own: a name of torch.optim, such as AdamW, or an import path",
    ),
    Slot(
        "lr_scheduler",
        base="torch.optim.lr_scheduler.LRScheduler",
        skip=1,
        help="in place of the model's own: a name of torch.optim.lr_scheduler, such as StepLR, or an import path",
    ),
)


def slots(trainer_class: Callable[..., Any]) -> dict[str, Slot]:
    """All slots by their keys: the plugins that the Trainer takes, then the classes."""
    found = {}
    for key, parameter in inspect.signature(trainer_class).parameters.items():
        kind = next((kind for kind in GROUPS if key in (kind, f"{kind}s")), None)
        if kind is not None:
            filled = frozenset({"save_dir"} if kind == "logger" else ())
            text = f"a name (`trivet plugins {kind}` lists them) or an import path"
            default = parameter.default if isinstance(parameter.default, str) and kind not in SEVERAL else ""
            found[key] = Slot(key, kind, several=kind in SEVERAL, filled=filled, help=text, default=default)
    return found | {slot.key: slot for slot in CLASSES}


# ------------------------------------------------------------------------------------------------------------ resolving


def canonical_name(slot: Slot, name: Any) -> str:
    """The name as it is stored: without aliases, and with the path of a class that was named shortly.

    Raises PluginNotFound or ConfigurationError with the nearest name.
    """
    text = str(name)
    if text.startswith(FORMERLY) and slot.key not in ("model", "data"):
        text = text.rpartition(".")[2]
    if "." in text and ":" not in text:
        return text
    if slot.kind:
        if slot.kind in AUTO and text == "auto":
            return text
        try:
            find(slot.kind, text)
        except PluginNotFound:
            found = _by_name(slot, text)
            if found is None:
                raise
            return path_of(found)
        return canonical(slot.kind, text)
    found = _by_name(slot, text)
    if found is None:
        raise ConfigurationError(_no_such_class(slot, text))
    return path_of(found)


def target_of(slot: Slot, name: str) -> Callable[..., Any] | None:
    """The class, or a plugin's factory function, that a canonical name stands for; None for "auto"."""
    if slot.kind and name == "auto":
        return None
    if slot.kind and ("." not in name or ":" in name):
        return load(slot.kind, name)
    return import_class(name, slot.base_class(), f"--{slot.key}")


def path_of(target: Callable[..., Any]) -> str:
    """The path to import a class by; the short one where torch exports it."""
    module, name = target.__module__, target.__qualname__
    for short in ("torch.optim", "torch.optim.lr_scheduler"):
        if module.startswith("torch.optim.") and getattr(importlib.import_module(short), name, None) is target:
            return f"{short}.{name}"
    return f"{module}.{name}"


def _by_name(slot: Slot, name: str) -> type[Any] | None:
    """A class that is imported already, a script's or torch's, by its bare name."""
    found = {path_of(cls): cls for cls in _below(slot.base_class()) if cls.__name__ == name}
    if len(found) > 1:
        raise ConfigurationError(f"--{slot.key} {name!r} is {' as well as '.join(sorted(found))}. Write one of these.")
    return next(iter(found.values()), None)


def _below(base: type[Any]) -> Iterator[type[Any]]:
    """Every subclass that can be imported by its path, without those that only answer to Lightning's names."""
    for cls in base.__subclasses__():
        here = getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls
        if here and not cls.__module__.startswith("trivet.compat."):
            yield cls
        yield from _below(cls)


def _no_such_class(slot: Slot, name: str) -> str:
    base = slot.base_class()
    known = sorted({cls.__name__ for cls in _below(base) if not cls.__name__.startswith("_")})
    by_lower = {found.lower(): found for found in known}
    near = get_close_matches(name.lower(), by_lower, n=1)
    if near:
        return f"--{slot.key} {name!r} is not known. Did you mean {by_lower[near[0]]!r}?"
    if base.__module__.startswith("torch."):
        return f"--{slot.key} {name!r} is not known. Expected one of {', '.join(known)}, or an import path."
    return f"--{slot.key} {name!r} is not an import path. Expected one such as 'package.module.{name}'."


def import_class(path: str, base: type[Any], flag: str) -> Callable[..., Any]:
    """Import ``package.module.Class`` and check that it is a ``base``. What the module itself raises is not caught."""
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigurationError(
            f"{flag} {path!r}: there is no module {error.name!r} in {os.getcwd()!r} or among the installed packages."
        ) from error
    found = getattr(module, name, None)
    fitting = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, base) and v is not base]
    if found is None:
        near = get_close_matches(name, fitting, n=1, cutoff=0.4)
        guess = f" Did you mean {module_name + '.' + near[0]!r}?" if near else ""
        raise ConfigurationError(f"{flag} {path!r}: module {module_name!r} has no {name!r}.{guess}")
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigurationError(
            f"{flag} {path!r} is {found!r}. Expected a subclass of {base.__module__}.{base.__name__}."
        )
    return found
