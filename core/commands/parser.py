"""The parser of ``fit``, ``validate`` and ``plan``: the Trainer's arguments, and those of what is selected."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import jsonargparse

from ..errors import ConfigurationError
from .selection import CLASSES, PLUGINS, SELECTOR, Selection

ABOUT = {
    "fit": "Train a model.",
    "validate": "Run the validation of a model.",
    "plan": "Show what a combination of flags would run, or every reason why it cannot, without running it.",
}
HELP = {
    "strategy": "where parameters live and who communicates; `trivet plugins strategy` lists the names",
    "accelerator": "the kind of device; `trivet plugins accelerator` lists the names",
    "precision": "the dtypes; `trivet plugins precision` lists the names",
    "launcher": "what starts the processes; `trivet plugins launcher` lists the names",
    "model": "the import path of a trivet.Module; the current directory is searched",
    "data": "the import path of a trivet.DataModule",
}


class Parser(jsonargparse.ArgumentParser):
    """A jsonargparse parser whose help shows ``--strategy NAME``, the form that is usually typed."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text: str = super().format_help(*args, **kwargs)
        for key, selector in SELECTOR.items():
            long = f"--{key}.{selector} {selector.upper()}"
            short = f"--{key} {'NAME' if key in PLUGINS else 'CLASS'}"
            text = text.replace(long, short.ljust(len(long)) if f"{long}  " in text else short)
        return text


def build_parser(
    command: str,
    selection: Selection,
    trainer_class: Callable[..., Any],
    *,
    prog: str,
    defaults: Mapping[str, Any] | None = None,
) -> Parser:
    """Make the parser for one command line. ``defaults`` are a script's own for the Trainer."""
    about = f"{ABOUT[command]} Configuration files come first, later ones on top, and flags over all of them."
    parser = Parser(prog=prog, usage=f"{prog} [--flag value ...]", description=about, exit_on_error=False)
    parser.add_argument("--config", action="config", help="A YAML file of flags; may be repeated.")
    if command == "plan":
        parser.add_argument("--json", action="store_true", help="print JSON, the conflicts as well")
        parser.add_argument("--explain", action="store_true", help="show who wants which capability, and who offers it")
    else:
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="the checkpoint to start from")
        parser.add_argument(
            "--seed",
            type=int | None,
            default=0,
            help="seed for python, numpy, torch and the data: the same command gives the same result; null draws one",
        )
    parameters = inspect.signature(trainer_class).parameters
    for key in (*PLUGINS, *CLASSES):
        target = selection.targets.get(key)
        group = parser.add_argument_group(f"{key} {target.__qualname__}" if target else key, _summary(target))
        if key not in selection.fixed:
            default = parameters[key].default if key in PLUGINS and key in parameters else None
            group.add_argument(f"--{key}.{SELECTOR[key]}", type=str | None, default=default, help=HELP[key])
        if inspect.isclass(target):
            group.add_class_arguments(target, key, as_group=False, instantiate=False, fail_untyped=False)
        elif target is not None:
            group.add_function_arguments(target, key, as_group=False, fail_untyped=False)
    group = parser.add_argument_group("trainer")
    group.add_class_arguments(trainer_class, None, as_group=False, skip=set(PLUGINS), instantiate=False)
    own = {key: value for key, value in (defaults or {}).items() if key not in SELECTOR}
    if unknown := [key for key in own if key not in parameters]:
        raise ConfigurationError(f"trainer_defaults has {unknown[0]!r}.{_nearest(unknown[0], parameters)}")
    parser.set_defaults(own)
    return parser


def _summary(target: Callable[..., Any] | None) -> str | None:
    """The first paragraph of a docstring, as the description of a group of flags."""
    return (inspect.getdoc(target) or "").partition("\n\n")[0].replace("\n", " ") or None if target else None


def parse(parser: Parser, selection: Selection) -> jsonargparse.Namespace:
    """Parse what was selected. Raises ConfigurationError with one message for everything a user can get wrong."""
    known = set(parser.get_defaults(skip_validation=True).keys()) | {"help", "print_config"}
    for flag in (token.partition("=")[0] for token in selection.flags if token.startswith("--") and token != "--"):
        _check_known(flag.removeprefix("--").removesuffix("+"), known, selection, shown=flag)
    for key in _leaves(selection.config, known):
        _check_known(key, known, selection, shown=f"configuration key {key!r}:")
    arguments = ["--config", json.dumps(selection.config, default=str)] if selection.config else []
    try:
        return parser.parse_args([*arguments, *selection.flags])
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"{error}\nSee {parser.prog} --help.") from error


def _leaves(config: Mapping[str, Any], known: set[str], prefix: str = "") -> Iterable[str]:
    """Dotted keys of a configuration, down to those that the parser knows."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in known and any(name.startswith(f"{path}.") for name in known):
            yield from _leaves(value, known, f"{path}.")
        else:
            yield path


def _check_known(key: str, known: set[str], selection: Selection, *, shown: str) -> None:
    parts = key.split(".")
    if any(".".join(parts[:n]) in known for n in range(1, len(parts) + 1)):
        return  # what lies below a known key, such as --callbacks.monitor, is judged by its type
    if parts[0] in SELECTOR and len(parts) > 1 and parts[0] not in selection.targets:
        kind = "NAME" if parts[0] in PLUGINS else "CLASS"
        raise ConfigurationError(
            f"{shown} is an option of a {parts[0]}, but none is selected. Add --{parts[0]} {kind}."
        )
    near = _nearest(key, {*known, *SELECTOR})
    raise ConfigurationError(f"{shown} is not known.{near or ' --help lists all.'}")


def _nearest(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = get_close_matches(key, names, n=1)
    if not near:  # a right name without its prefix, as --lr for --model.lr
        near = get_close_matches(key, [name for name in names if name.rpartition(".")[2] == key], n=1, cutoff=0.0)
    return f" Did you mean --{near[0]}?" if near else ""
