"""Which plugins and classes a command line selects, found before its parser is built.

A parser can only offer ``--strategy.static_graph`` when it knows that the strategy is ``ddp``. So the selecting flags
are taken from the command line and the configuration files first, wherever they stand, and become one mapping:

    --strategy ddp                                  {"strategy": {"name": "ddp"}}
    strategy: {name: ddp, static_graph: true}       {"strategy": {"name": "ddp", "static_graph": true}}
    model: {class_path: pkg.Net, init_args: {...}}  {"model": {"class_path": "pkg.Net", ...}}

Only what is selected is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigurationError
from ..plugin_checks import base_class
from ..registry import canonical, load

PLUGINS = ("strategy", "accelerator", "precision", "launcher")
CLASSES = ("model", "data")
SELECTOR = {**dict.fromkeys(PLUGINS, "name"), **dict.fromkeys(CLASSES, "class_path")}


@dataclass
class Selection:
    """A command line whose selecting flags and files are read.

    ``flags``: the tokens that are left, for the parser. ``config``: defaults, files and selecting flags, the later ones
    on top. ``targets``: the class (or a plugin's factory function) of each key that is selected. ``fixed``: the keys
    whose class the script itself has given.
    """

    flags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Callable[..., Any]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()


def select(
    argv: Sequence[str], fixed: Mapping[str, type[Any] | None], defaults: Mapping[str, Any] | None = None
) -> Selection:
    """Read the selecting flags and files; import what they select."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # `trivet`, unlike `python -m trivet`, starts without it
    targets: dict[str, Callable[..., Any]] = {key: cls for key, cls in fixed.items() if cls is not None}
    selection = Selection(targets=targets, fixed=frozenset(targets))
    selectors: dict[str, Any] = {}
    layers: list[Mapping[str, Any]] = [defaults or {}]
    tokens = iter(argv)
    for token in tokens:
        flag, equals, value = token.partition("=")
        key = _selected_key(flag)
        if key is None:
            selection.flags.append(_without_init_args(token))
            continue
        text = value if equals else next(tokens, "")
        if not text or text.startswith("--"):
            raise ConfigurationError(f"{flag} was given without a value.")
        if key == "config":
            layers.append(_read(text))
        else:
            selectors[key] = _yaml(text, flag) if text.startswith("{") else text
    for layer in [*layers, selectors]:
        selection.config = _merge(selection.config, _expand(layer, targets))
    for key in SELECTOR:
        if key not in selection.fixed and (target := _target(key, selection.config)) is not None:
            targets[key] = target
    return selection


def _selected_key(flag: str) -> str | None:
    """``config``, or the key that a flag selects a plugin or class for, or None for any other flag."""
    if flag == "--config":
        return "config"
    key, _, rest = flag.removeprefix("--").partition(".")
    selecting = flag.startswith("--") and key in SELECTOR and rest in ("", "class_path", SELECTOR.get(key))
    return key if selecting else None


def _without_init_args(token: str) -> str:
    """``--model.init_args.lr`` means ``--model.lr``."""
    key, _, rest = token.removeprefix("--").partition(".")
    return f"--{key}.{rest.removeprefix('init_args.')}" if key in SELECTOR else token


# ------------------------------------------------------------------------------------------------------- configuration


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ConfigurationError(f"--config {path!r} cannot be read: {error.strerror}.") from error
    return _yaml(text, f"--config {path!r}")


def _yaml(text: str, where: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]
    from jsonargparse import get_loader

    try:
        loaded = get_loader("yaml")(text)  # unlike PyYAML's own, it reads 1e-3 as a number
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigurationError(f"{where} holds {type(loaded).__name__!r}. Expected a mapping of flags to values.")
    return loaded


def _expand(layer: Mapping[str, Any], fixed: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Bring each selecting value, whatever its form, into ``{selector: name, option: value, ...}``."""
    expanded = dict(layer)
    for key, selector in SELECTOR.items():
        value = expanded.pop(key, None)
        if value is None:
            continue
        if isinstance(value, (str, int)):
            value = {selector: str(value)}
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"{key}={value!r}. Expected a name, or a mapping with {selector!r} and options.")
        options = dict(value)
        options |= options.pop("init_args", None) or {}
        name = options.pop("class_path", None)
        if selector == "name":
            name = options.pop("name", name)
        if key in fixed and name not in (None, _path(fixed[key])):
            raise ConfigurationError(
                f"--{key} {name!r}: this script's {key} is {_path(fixed[key])!r}. Use `trivet` to run another one."
            )
        if name is not None and key not in fixed:
            options[selector] = canonical(key, name) if key in PLUGINS else name
        expanded[key] = options
    return expanded


def _path(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _merge(base: Mapping[str, Any], new: Mapping[str, Any], selector: str = "class_path") -> dict[str, Any]:
    """``new`` on top of ``base``, mapping by mapping; options of a class that is no longer selected are dropped."""
    if selector in base and selector in new and base[selector] != new[selector]:
        return dict(new)
    merged = dict(base)
    for key, value in new.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(old, value, "name" if key in PLUGINS else "class_path")
        else:
            merged[key] = value
    return merged


# ------------------------------------------------------------------------------------------------------------- classes


def _target(key: str, config: Mapping[str, Any]) -> Callable[..., Any] | None:
    name = config.get(key, {}).get(SELECTOR[key])
    if name is None or (key in PLUGINS and name == "auto"):
        return None
    if key in PLUGINS and "." not in name:
        return load(key, name)
    from .. import DataModule, Module

    bases: dict[str, type[Any]] = {"model": Module, "data": DataModule}
    return import_class(name, bases.get(key) or base_class(key), f"--{key}")


def import_class(path: str, base: type[Any], flag: str) -> type[Any]:
    """Import ``package.module.Class`` and check that it is a ``base``. What the module itself raises is not caught."""
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigurationError(
            f"{flag} {path!r} is not an import path. Expected one such as 'package.module.{path}'."
        )
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
