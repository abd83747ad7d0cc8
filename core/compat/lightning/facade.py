"""Modules that stand for Lightning's: their names are looked up in `names` when they are first used."""

from __future__ import annotations

import difflib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .names import CHILDREN, HERE, INSTEAD, PACKAGES, SOURCES, TARGETS

ALIASES = {"lightning": HERE, "pytorch_lightning": f"{HERE}.pytorch", "lightning_fabric": f"{HERE}.fabric"}
VARIABLE = "TRIVET_LIGHTNING_ALIASES"  # tells processes that a run starts to lead ``import lightning`` here, too


class Facade(ModuleType):
    """One of Lightning's modules, such as ``pytorch.callbacks.early_stopping``."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # it is a package

    def __getattr__(self, name: str) -> Any:
        return find(self.__name__.removeprefix(f"{HERE}."), name)

    def __dir__(self) -> list[str]:
        return known(self.__name__.removeprefix(f"{HERE}."))


def find(path: str, name: str) -> Any:
    """What a name of a module of Lightning leads to.

    Raises ImportError with the advice for names that lead nowhere, since an AttributeError would become an ImportError
    without its text in ``from ... import``; and AttributeError for names that Lightning does not have either.
    """
    children = PACKAGES if not path else CHILDREN if path in PACKAGES else ()
    if name in children:
        return importlib.import_module(f"{HERE}.{path}.{name}" if path else f"{HERE}.{name}")
    place = _known_path(path)
    if name in TARGETS.get(place, {}):
        module, _, attribute = TARGETS[place][name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in INSTEAD:
        raise ImportError(f"Trivet has no {name}. {INSTEAD[name]}", name=name)
    for source in SOURCES.get(place, ()):
        module_of_ours = importlib.import_module(source)
        if not name.startswith("_") and hasattr(module_of_ours, name):
            return getattr(module_of_ours, name)
    near = difflib.get_close_matches(name, known(path), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise AttributeError(f"module {HERE}{path and '.'}{path} has no attribute {name!r}.{hint}")


def known(path: str) -> list[str]:
    """The names that a module has."""
    place = _known_path(path)
    sources = [dir(importlib.import_module(source)) for source in SOURCES.get(place, ())]
    names = {name for found in sources for name in found if not name.startswith("_")}
    children = PACKAGES if not path else CHILDREN if path in PACKAGES else ()
    return sorted({*names, *TARGETS.get(place, {}), *children})


def _known_path(path: str) -> str:
    """The longest part of a path whose names are known: of ``pytorch.callbacks.timer`` it is ``pytorch.callbacks``."""
    while path and path not in TARGETS and path not in SOURCES:
        path = path.rpartition(".")[0]
    return path


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules below this package and, where that is wanted, lets Lightning's own names lead to them."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}
        self._specs: dict[str, Any] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        ours = top in self.aliases or fullname.startswith(tuple(f"{HERE}.{package}" for package in PACKAGES))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        top, _, rest = spec.name.partition(".")
        if top not in self.aliases:
            return Facade(spec.name)
        module = importlib.import_module(f"{self.aliases[top]}.{rest}" if rest else self.aliases[top])
        self._specs[spec.name] = module.__spec__  # the import machinery is about to replace it by the alias's
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None and module.__spec__.name in self._specs:
            module.__spec__ = self._specs.pop(module.__spec__.name)


_FINDER = Finder()


def install() -> None:
    """Let ``trivet.compat.lightning.pytorch`` and what is below be imported, and the aliases in a run that has them."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if os.environ.get(VARIABLE):
        _FINDER.aliases = ALIASES


def alias() -> None:
    """Lead ``import lightning`` and ``import pytorch_lightning`` here, in this process and in those that it starts."""
    os.environ[VARIABLE] = "1"
    install()
