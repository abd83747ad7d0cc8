"""What is said of a key that nobody knows, and of a value that its key does not take."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ..errors import ConfigurationError
from .selection import Flag, Selection


def check_keys(selection: Selection, known: set[str]) -> None:
    """Raise ConfigurationError for the first key that the parser does not know, with the nearest one."""
    by_lower = {name.lower(): name for name in known}
    for number, flag in enumerate(selection.flags):
        key = flag.key.removesuffix("+")
        if flag.environment:  # where names have no case of their own
            key = by_lower.get(key, key)
            selection.flags[number] = flag._replace(key=key)
        if not _is_known(key, known):
            raise ConfigurationError(_unknown(selection, key, known, flag.shown, "--"))
    for key in _leaves(selection.settings.values, known):
        if not _is_known(key.removesuffix("+"), known):
            origins = selection.settings.origins
            found = next((origins[name] for name in origins if name == key or name.startswith(f"{key}.")), [])
            where = f"{found[-1].source}: " if found else ""
            raise ConfigurationError(_unknown(selection, key, known, f"{where}{key}", ""))


def _is_known(key: str, known: set[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:n]) in known for n in range(1, len(parts) + 1))  # its type judges what lies below


def _leaves(config: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterable[str]:
    """Dotted keys of a configuration, down to those that the parser knows."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        below = isinstance(value, Mapping) and path not in known and any(k.startswith(f"{path}.") for k in known)
        if below:
            yield from _leaves(value, known, f"{path}.")
        elif value != {}:
            yield path


def _unknown(selection: Selection, key: str, known: set[str], shown: str, dashes: str) -> str:
    own = ["config", "print_config", "explain", "help"] if dashes else []
    found = nearest(key, {*known, *selection.slots, *own}, dashes)
    if shown.startswith("TRIVET_"):
        prefix = f"{shown.partition('__')[0]}__"
        found = re.sub(r"--(\S+)\?", lambda match: prefix + match[1].replace(".", "__").upper() + "?", found)
    head = key.split(".")[0]
    if key == "output":
        return f"{shown} belongs to `trivet predict`; other commands write below --default_root_dir."
    if not found and head in ("model", "data", "optimizer", "lr_scheduler") and head not in selection.targets:
        return f"{shown} is an option of a {head}, but none is selected. Add --{head} CLASS."
    return f"{shown} is not known.{found or ' --help lists all.'}"


def nearest(key: str, known: Iterable[str], dashes: str = "--") -> str:
    """A question for the nearest name, or an empty string."""
    names = sorted(known)
    near = get_close_matches(key, names, n=1)
    if not near:  # a right name without its prefix, as --lr for --model.lr
        near = get_close_matches(key, [name for name in names if name.rpartition(".")[2] == key], n=1, cutoff=0.0)
    return f" Did you mean {dashes}{plain(near[0])}?" if near else ""


def plain(key: str) -> str:
    """A key as a user writes it: ``callbacks.monitor`` for the first callback's, ``callbacks.1.monitor``."""
    return re.sub(r"^(callbacks|logger)\.0\.", r"\1.", key)


# ------------------------------------------------------------------------------------------------------- wrong values


def must_be_given(keys: Iterable[str]) -> str:
    """What to do about arguments that have no default."""
    names = [plain(key) for key in keys]
    return f"{' and '.join(names)} must be given: --{names[0]} VALUE, or in a --config file."


def said_of(error: Exception, selection: Selection) -> str:
    """An error of jsonargparse in our words: what was found, where, and what was expected."""
    text = str(error)
    if needed := re.search(r"the following arguments are required: (.*)", text):
        return must_be_given(key.strip() for key in needed[1].split(","))
    match = re.search(r'[Pp]arser key "([^"]+)":\s*(.*)', text, re.DOTALL)
    if match is None:
        return text
    key, details = match[1], match[2]
    where = _where(key, selection)
    problems = [*dict.fromkeys(_problem(*found) for found in re.findall(_PROBLEM, details))]
    if problems:
        return f"{where}: {' '.join(problems)}"
    if expected := _expected(details):
        return f"{where}. Expected {expected}."
    return f"{where}: {details.strip()}"


_PROBLEM = r"Problem with given class_path '([^']+)':\s*\n?\s*([^\n]+)"


def _where(key: str, selection: Selection) -> str:
    """Who gave the value of a key, as it was written."""
    for flag in reversed(selection.flags):
        if flag.key == key or flag.key.startswith(f"{key}."):
            return _written(flag)
    origins = selection.settings.origins
    found = [(name, origins[name][-1]) for name in origins if name == key or name.startswith(f"{key}.")]
    if len(found) == 1:
        return f"{found[0][1].source}: {plain(found[0][0])}={found[0][1].value!r}"
    return f"{found[-1][1].source}: {plain(key)}" if found else plain(key)


def _written(flag: Flag) -> str:
    return f"{flag.shown}={flag.value!r}" if flag.environment else f"{flag.shown} {flag.value!r}"


def _problem(path: str, said: str) -> str:
    unknown = re.search(r"(?:Option|Key|Group key) '([^']+)' is not (?:accepted|expected)", said)
    if unknown is None:
        return f"{path}: {said.strip().rstrip('.')}."
    return f"{path} has no option {unknown[1]!r}.{_nearest_option(path, unknown[1])}"


def _nearest_option(path: str, name: str) -> str:
    import jsonargparse

    module, _, attribute = path.rpartition(".")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(getattr(importlib.import_module(module), attribute), fail_untyped=False)
    return nearest(name, parser.get_defaults(skip_validation=True).keys(), "")


def _expected(details: str) -> str:
    """The types in an error of jsonargparse, as a user would write them."""
    found = re.search(r"Subtypes: \[(.*)\]", details) or re.search(r"Expected an? (.*?)\. Got value", details)
    if found is None:
        return ""
    names = re.sub(r"<class '([^']+)'>", r"\1", found[1]).replace("typing.", "").replace("NoneType", "null")
    parts = [re.sub(r"\b[\w.]+\.(\w+)", r"\1", name) for name in re.split(r", (?![^\[]*\])", names)]
    parts = [_choices(part) for part in parts]
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _choices(name: str) -> str:
    """``Literal['a', 'b']`` as its values."""
    found = re.fullmatch(r"Literal\[(.*)\]", name)
    return name if found is None else found[1]
