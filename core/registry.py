"""Plugins through entry points: list them from metadata alone, load the selected one, make it with its options.

Importing this module imports neither torch nor a plugin; `entries` and `find` read metadata only.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from importlib import metadata
from typing import Any

from .errors import ConfigurationError, PluginBroken, PluginConflict, PluginNotFound, TrivetError
from .plugin_checks import base_class, check_answers, check_class, check_options, resolve_function
from .requirements import missing_package, normalized

GROUPS = {
    "strategy": "trivet.strategies",
    "accelerator": "trivet.accelerators",
    "precision": "trivet.precision",
    "logger": "trivet.loggers",
    "callback": "trivet.callbacks",
    "environment": "trivet.environments",
    "launcher": "trivet.launchers",
    "submitter": "trivet.submitters",
}

# Other spellings of our own names. The bare numbers mean what Lightning made them mean: 16 is fp16-mixed.
ALIASES: dict[str, dict[str, str]] = {
    "accelerator": {"gpu": "cuda", "tpu": "xla"},
    "precision": {
        "fp8": "fp8-mixed",
        "bf16": "bf16-mixed",
        "fp16": "fp16-mixed",
        "16": "fp16-mixed",
        "16-mixed": "fp16-mixed",
        "16-true": "fp16-true",
        "32": "fp32",
        "32-true": "fp32",
        "64": "fp64",
        "64-true": "fp64",
    },
    "logger": {"CSVLogger": "csv", "TensorBoardLogger": "tensorboard"},
    "callback": {"progress_bar": "progress"},
}

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

# The kinds for which "auto" is a name; `capabilities.resolve` chooses.
AUTO = frozenset({"strategy", "accelerator", "launcher"})


def label(kind: str, name: str, distribution: str, version: str) -> str:
    """How a plugin is named in every message: ``precision 'fp64' (trivet 0.1.0)``."""
    return f"{kind} {name!r} ({f'{distribution} {version}'.strip()})"


@dataclass(frozen=True)
class Entry:
    """One entry point, as metadata tells it. ``target`` is ``module:attribute``."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str

    @property
    def qualified(self) -> str:
        """The name that stays unique when another distribution registers the same one: ``dist:name``."""
        return f"{self.distribution}:{self.name}"

    def __str__(self) -> str:
        return label(self.kind, self.name, self.distribution, self.version)


@dataclass(frozen=True)
class Selected:
    """A plugin that was made, with the distribution it came from (``"local"`` where none claims its class)."""

    kind: str
    name: str
    plugin: Any
    distribution: str
    version: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return label(self.kind, self.name, self.distribution, self.version)


# ------------------------------------------------------------------------------------------------------------- listing


def entries(kind: str) -> list[Entry]:
    """All entry points of one kind, sorted by name and distribution. Reads metadata only.

    A distribution that is found twice on ``sys.path`` counts once, the first time. One whose metadata cannot be read is
    left out, so that it disturbs nobody who does not select it; `find` names it when the name is not found elsewhere.
    """
    return list(_scan(kind)[0])


def _scan(kind: str) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    if kind not in GROUPS:
        raise ConfigurationError(f"no kind of plugin is named {kind!r}. Kinds: {', '.join(GROUPS)}.")
    return _scanned(GROUPS[kind], kind, tuple(map(_stamp, sys.path)))


def _stamp(path: str) -> tuple[Any, ...]:
    """What differs after something was installed there or removed, or where another directory is meant."""
    try:
        found = os.stat(path or ".")
    except OSError:
        return (path,)
    return path, found.st_dev, found.st_ino, found.st_mtime_ns


@lru_cache(maxsize=2 * len(GROUPS))
def _scanned(group: str, kind: str, path: tuple[Any, ...]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    found: dict[tuple[str, str], Entry] = {}
    seen: set[str] = set()
    unreadable: list[str] = []
    for distribution in metadata.distributions():
        name = "a distribution without a name"
        try:
            # Most distributions have no plugin of ours: their metadata, the slow part, is not parsed.
            if f"[{group}]" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = distribution.metadata["Name"], distribution.version
            if normalized(name) in seen:
                continue
            points = distribution.entry_points.select(group=group)
        except Exception as error:
            unreadable.append(f"{name} ({type(error).__name__}: {error})")
            continue
        seen.add(normalized(name))
        for point in points:
            found.setdefault((name, point.name), Entry(kind, point.name, name, version, point.value))
    return tuple(sorted(found.values(), key=lambda entry: (entry.name, entry.distribution))), tuple(unreadable)


def canonical(kind: str, name: str | int) -> str:
    """The name with our aliases applied: ``bf16`` is ``bf16-mixed``, ``gpu`` is ``cuda``, ``32`` is ``fp32``.

    A callback's class name stands for its name, ``EarlyStopping`` for ``early_stopping``.
    """
    distribution, colon, bare = str(name).rpartition(":")
    if kind == "callback":
        bare = _CAPITAL.sub("_", bare).lower()
    return f"{distribution}{colon}{ALIASES.get(kind, {}).get(bare, bare)}"


def find(kind: str, name: str | int) -> Entry:
    """The entry point with this name, alias or qualified name ``dist:name``. Reads metadata only.

    Raises PluginNotFound with the nearest name, and PluginConflict where two distributions registered it. An alias of
    ours that somebody else registered as a name is such a conflict: it must not change its meaning silently.
    """
    listed, unreadable = _scan(kind)
    distribution, _, bare = str(name).rpartition(":")
    by_distribution: dict[str, Entry] = {}
    for wanted in (bare, canonical(kind, bare)):
        for entry in listed:
            if entry.name == wanted and (
                not distribution or normalized(entry.distribution) == normalized(distribution)
            ):
                by_distribution.setdefault(entry.distribution, entry)
    matches = list(by_distribution.values())
    if not matches:
        raise PluginNotFound(_not_found(kind, str(name), listed, unreadable))
    if len(matches) > 1:
        sides = ", ".join(f"{entry.qualified!r} ({entry.distribution} {entry.version})" for entry in matches)
        raise PluginConflict(
            f"{kind} {bare!r} is registered by {len(matches)} distributions. Say which one you mean: {sides}."
        )
    return matches[0]


def _not_found(kind: str, name: str, listed: Sequence[Entry], unreadable: Sequence[str]) -> str:
    counts = Counter(entry.name for entry in listed)
    available = {entry.name if counts[entry.name] == 1 else entry.qualified for entry in listed}
    if kind in AUTO:
        available.add("auto")
    aliases = {alias for alias, meant in ALIASES.get(kind, {}).items() if meant in counts}
    names = {known.lower(): known for known in sorted({*available, *counts, *aliases})}
    meant = canonical(kind, name)
    near = [names[found] for found in get_close_matches(meant.lower(), names, n=1, cutoff=0.5)]
    text = f"no {kind} is named {name!r}."
    if meant != name and kind != "callback":  # whose class names are no aliases
        text = f"no {kind} is named {meant!r}, for which {name!r} is an alias."
    elif near:
        text += f" Did you mean {near[0]!r}?"
    text += f" Available: {', '.join(sorted(available)) or 'none'}."
    if kind == "launcher" and any(entry.name == meant for entry in entries("submitter")):
        text += f" `trivet submit --to {meant} ...` hands a command to {meant} as a job."
    if unreadable:
        text += f" The entry points of these distributions could not be read: {'; '.join(unreadable)}."
    return text


# ------------------------------------------------------------------------------------------------------------- loading


def load(kind: str, name: str | int) -> type[Any] | Callable[..., Any]:
    """Import the one module that the entry point names; return its class, or its function that returns an instance.

    Raises PluginNotFound, PluginConflict, PluginBroken (import failed, attribute missing) and PluginInvalid (not a
    plugin of that kind, another interface number, methods missing or not callable as the base class's are).
    """
    return _load(find(kind, name))


def _load(entry: Entry) -> type[Any] | Callable[..., Any]:
    target = _import(str(entry), entry.target, entry.distribution)
    if isinstance(target, type):
        check_class(str(entry), target, entry.kind, entry.distribution)
        return target
    return resolve_function(str(entry), target, entry.kind, entry.distribution)


def _import(who: str, target: str, distribution: str) -> Any:
    module, _, attribute = target.partition("[")[0].strip().partition(":")
    module = module.strip()
    try:
        value: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"{who} cannot be loaded from {target!r}: {_told(error)}{missing_package(error, distribution, module)}"
        ) from error
    try:
        for part in attribute.strip().split(".") if attribute.strip() else []:
            value = getattr(value, part)
    except AttributeError as error:
        # A folder of the same name in the current directory is found before a module that is installed.
        where = getattr(sys.modules[module], "__file__", None) or list(getattr(sys.modules[module], "__path__", ()))
        raise PluginBroken(f"{who} cannot be loaded from {target!r}: {error}; it was imported from {where}.") from error
    return value


def _told(error: BaseException) -> str:
    """What was raised, and the line that raised it: the last of its traceback that is not of Python's import system."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, importlib.__file__)]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    if isinstance(error, SyntaxError):
        return f"{text}."  # says file and line itself
    return (
        f"{text} (File {frames[-1].filename!r}, line {frames[-1].lineno}: {frames[-1].line})." if frames else f"{text}."
    )


# -------------------------------------------------------------------------------------------------------------- making


def make(kind: str, spec: Any, *, defaults: Mapping[str, Any] | None = None) -> Selected:
    """Make a plugin from what a user wrote. ``defaults`` are for options that it has and the user did not give.

    ``spec``: a name (``"ddp"``, ``"dist:ddp"``, an alias, 16), an `Entry`, an instance, a class, or a mapping:
    ``{"name": "ddp", "static_graph": True}`` or ``{"class_path": "pkg.Class", "init_args": {...}}``. What `load`
    raises, it raises, and ConfigurationError for options that the plugin does not have.
    """
    base, defaults = base_class(kind), defaults or {}
    if isinstance(spec, Selected):
        return spec
    if isinstance(spec, Entry):
        return _make_entry(spec, {}, defaults)
    if isinstance(spec, Mapping):
        return _make_from_mapping(kind, dict(spec), defaults)
    if isinstance(spec, str) or (isinstance(spec, int) and not isinstance(spec, bool)):
        return _make_entry(find(kind, spec), {}, defaults)
    if isinstance(spec, type) and issubclass(spec, base):
        return _make_class(kind, spec, {}, defaults)
    if isinstance(spec, base):
        name, distribution, version = _origin(kind, type(spec))
        check_class(label(kind, name, distribution, version), type(spec), kind, distribution)
        return _selected(kind, name, spec, distribution, version, {})
    raise ConfigurationError(
        f"{kind}={spec!r} is a {type(spec).__name__}. Expected a name, a "
        f"{base.__name__} object, or a mapping with 'name' or 'class_path'."
    )


def kind_of(plugin: Any) -> str | None:
    """Of which kind an object is, or None."""
    return next((kind for kind in GROUPS if isinstance(plugin, base_class(kind))), None)


def _make_from_mapping(kind: str, spec: dict[str, Any], defaults: Mapping[str, Any]) -> Selected:
    given = dict(spec)
    name, path = spec.pop("name", None), spec.pop("class_path", None)
    options = {**spec.pop("init_args", {}), **spec}
    if (name is None) == (path is None):
        raise ConfigurationError(
            f"{kind}={given!r}: a mapping has either 'name' or 'class_path', and options beside it."
        )
    if path is None or "." not in path:
        return _make_entry(find(kind, name if path is None else path), options, defaults)
    target = path if ":" in path else ":".join(path.rpartition(".")[::2])
    cls = _import(f"{kind} {path!r}", target, path.partition(".")[0])
    if not isinstance(cls, type):
        raise ConfigurationError(f"{kind}={given!r}: {path!r} is not a class but {cls!r}.")
    return _make_class(kind, cls, options, defaults)


def _make_class(kind: str, cls: type[Any], options: dict[str, Any], defaults: Mapping[str, Any]) -> Selected:
    name, distribution, version = _origin(kind, cls)
    who = label(kind, name, distribution, version)
    check_class(who, cls, kind, distribution)
    options = _with_defaults(cls, options, defaults)
    return _selected(kind, name, _construct(who, cls, options, distribution), distribution, version, options)


def _with_defaults(factory: Callable[..., Any], options: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters if defaults else {}
    return {**{name: value for name, value in defaults.items() if name in parameters}, **options}


def _make_entry(entry: Entry, options: dict[str, Any], defaults: Mapping[str, Any]) -> Selected:
    factory = _load(entry)
    options = _with_defaults(factory, options, defaults)
    plugin = _construct(str(entry), factory, options, entry.distribution)
    if not isinstance(factory, type):
        check_class(str(entry), type(plugin), entry.kind, entry.distribution)
    return _selected(entry.kind, entry.name, plugin, entry.distribution, entry.version, options)


def _selected(kind: str, name: str, plugin: Any, distribution: str, version: str, options: dict[str, Any]) -> Selected:
    check_answers(label(kind, name, distribution, version), plugin, kind)
    # Strategies, accelerators and precisions tell all their options, so that a name and an object give the same Plan.
    known = plugin.options() if kind in ("strategy", "accelerator", "precision") else options
    return Selected(kind, name, plugin, distribution, version, known)


def _construct(who: str, factory: Callable[..., Any], options: dict[str, Any], distribution: str) -> Any:
    check_options(who, factory, options)
    try:
        return factory(**options)
    except ConfigurationError as error:
        raise error.with_traceback(None) from error.__cause__  # which says it all; frames would hide it
    except TrivetError:
        raise
    except ImportError as error:
        raise PluginBroken(f"{who} cannot be made: {_told(error)}{missing_package(error, distribution)}") from error
    except Exception as error:
        raise ConfigurationError(f"{who} refused its options {options!r}: {type(error).__name__}: {error}") from error


def _origin(kind: str, cls: type[Any]) -> tuple[str, str, str]:
    """Name, distribution and version of a class that did not come through its entry point. Imports nothing."""
    listed = entries(kind)
    for entry in listed:
        module, _, attribute = entry.target.partition(":")
        if getattr(sys.modules.get(module.strip()), attribute.strip(), None) is cls:
            return entry.name, entry.distribution, entry.version
    try:
        distribution = metadata.packages_distributions()[cls.__module__.partition(".")[0]][0]
        return cls.__name__, distribution, metadata.version(distribution)
    except Exception:
        # KeyError where no distribution has the module; anything else is somebody's unreadable metadata.
        return cls.__name__, "local", ""
