"""The parser of one command line: the Trainer's arguments, and those of what is selected."""

from __future__ import annotations

import argparse
import inspect
import json
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jsonargparse

from ..errors import ConfigurationError
from .help import formatter
from .mistakes import check_keys, must_be_given, nearest, said_of
from .script import Script
from .selection import Selection
from .slots import Slot

ABOUT = {
    "fit": "Train a model.",
    "validate": "Run the validation of a model.",
    "test": "Test a model.",
    "predict": "Predict with a model, and keep what it predicts in files.",
    "plan": "Show what a combination of flags would run, or every reason why it cannot, without running it.",
}
CKPT = {"fit": "the checkpoint to go on from", "plan": "the checkpoint that would be gone on from"}
SCHEDULE = {
    "interval": (
        Literal["epoch", "update", "step"],
        "epoch",
        "what a step of the scheduler follows: `epoch` or `update`",
    ),
    "frequency": (int, 1, "the number of them between two steps"),
    "monitor": (str | None, None, "the metric that ReduceLROnPlateau watches, such as val/loss"),
}


def build_parser(
    command: str, selection: Selection, script: Script, trainer_class: Callable[..., Any], *, prog: str,
    targets: Iterable[str] = (),
) -> jsonargparse.ArgumentParser:  # fmt: skip
    """Make the parser for one command line. ``targets`` are the keys that links fill, which nobody has to give."""
    parser = jsonargparse.ArgumentParser(
        prog=prog, usage=f"{prog} [--flag value ...]", description=_description(command), exit_on_error=False,
        print_config=None,
    )  # fmt: skip
    _add_own(parser, command)
    typed: dict[str, str] = {}
    linked = frozenset(targets)
    parameters = inspect.signature(trainer_class).parameters
    for slot in selection.slots.values():
        default = parameters[slot.key].default if slot.kind else None
        keys = selection.keys_of(slot)
        if slot.several and not keys:
            group = parser.add_argument_group(slot.key)
            group.add_argument(f"--{slot.key}", type=typing.Any, default=default, help=_help(slot), metavar="NAME")
        for key in keys:
            _add_slot(parser, key, slot, selection, default, linked, typed)
    parser.formatter_class = formatter(typed)
    group = parser.add_argument_group("trainer")
    skip = {slot.key for slot in selection.slots.values() if slot.kind}
    group.add_class_arguments(trainer_class, None, as_group=False, skip=skip, instantiate=False, fail_untyped=False)
    own = {key: value for key, value in script.trainer_defaults.items() if key not in selection.slots}
    if unknown := [key for key in own if key not in parameters]:
        raise ConfigurationError(f"trainer_defaults has {unknown[0]!r}.{nearest(unknown[0], parameters)}")
    parser.set_defaults(own)
    if script.extend is not None:
        script.extend(parser)
    return parser


def _description(command: str) -> str:
    name = "FIT" if command == "plan" else command.upper()
    return (
        f"{ABOUT[command]} Each value is taken from the flags, else from the environment (--model.lr is "
        f"TRIVET_{name}__MODEL__LR there), else from the last configuration file that has it, else it is the default. "
        "With what is selected given, such as --strategy NAME, this help has its own options, too."
    )


def _add_own(parser: jsonargparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--config", action="config", metavar="FILE", help="a YAML file of flags; may be repeated")
    parser.add_argument("--print_config", action="store_true", help="print every value as such a file, and end")
    if command == "plan":
        parser.add_argument("--json", action="store_true", help="print JSON, the conflicts as well")
        parser.add_argument(
            "--explain",
            action="store_true",
            help="show who wants which capability, and who offers it; with a KEY after it: who set that value",
        )
    else:
        parser.add_argument("--explain", metavar="KEY", help="say who set a value, or without KEY all, and end")
    parser.add_argument(
        "--ckpt_path", type=str | None, metavar="PATH", help=CKPT.get(command, "the checkpoint whose weights are used")
    )
    parser.add_argument(
        "--ckpt_hparams",
        type=bool,
        default=False,
        help="take the model's arguments from the checkpoint where neither environment nor flags give them",
    )
    parser.add_argument(
        "--seed",
        type=int | None,
        default=0,
        help="seed for python, numpy, torch and the data: the same command gives the same result; null draws one",
    )
    if command == "predict":
        parser.add_argument(
            "--output",
            type=str | None,
            metavar="PATH",
            help="where predictions are written: NAME.pt is one file with all of them; any other path is a directory "
            "with a file for each batch, written as soon as it is predicted. What an earlier command wrote there is "
            "replaced. By default predictions.pt in the directory of the run",
        )


def _add_slot(
    parser: jsonargparse.ArgumentParser, key: str, slot: Slot, selection: Selection, default: Any,
    linked: frozenset[str], typed: dict[str, str],
) -> None:  # fmt: skip
    target = selection.targets.get(key)
    title = f"{slot.key} {getattr(target, '__qualname__', target)}" if target else slot.key
    group = parser.add_argument_group(title, _summary(target))
    if slot.key not in selection.settings.fixed:
        metavar = "NAME" if slot.kind else "CLASS"
        group.add_argument(
            f"--{key}.{slot.selector}", type=str | None, default=default, help=_help(slot), metavar=metavar
        )
        typed[f"--{key}.{slot.selector} {metavar}"] = f"--{slot.key} {metavar}"
    if slot.several:
        typed[f"--{key}."] = f"--{slot.key}."
    if target is None:
        return
    names = _first(target, slot.skip)
    optional = {name for name in _required(target) if name in slot.filled or f"{key}.{name}" in linked}
    options: dict[str, Any] = {"as_group": False, "fail_untyped": False, "skip": {*names, *optional}}
    if inspect.isclass(target):
        group.add_class_arguments(target, key, instantiate=False, **options)
    else:
        group.add_function_arguments(target, key, **options)
    for name in optional:
        why = "from a link" if f"{key}.{name}" in linked else "the Trainer's default_root_dir by default"
        group.add_argument(f"--{key}.{name}", type=_hint(target, name), default=None, help=why)
    if slot.key == "lr_scheduler":
        taken = inspect.signature(target).parameters
        for name, (kind, value, text) in SCHEDULE.items():
            if name not in taken:
                group.add_argument(f"--{key}.{name}", type=kind, default=value, help=text)


def _help(slot: Slot) -> str:
    return f"{slot.help}; --{slot.key}+ NAME adds one to those of files" if slot.several else slot.help


def _summary(target: Callable[..., Any] | None) -> str | None:
    """The first paragraph of a docstring, as the description of a group of flags."""
    own = target is not None and vars(target).get("__doc__")  # not that of a base class
    text = (inspect.getdoc(target) or "").partition("\n\n")[0] if own else ""
    return " ".join(text.replace(":class:", "").replace("`", "").split()) or None


def _first(target: Callable[..., Any], count: int) -> list[str]:
    return list(inspect.signature(target).parameters)[:count]


def _required(target: Callable[..., Any]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(target).parameters.values()
    return [one.name for one in parameters if one.kind in named and one.default is one.empty]


def _hint(target: Callable[..., Any], name: str) -> Any:
    try:
        hint = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target).get(name, typing.Any)
    except NameError:  # imported for type checkers only
        return typing.Any
    return hint | None if hint is not typing.Any else hint


# -------------------------------------------------------------------------------------------------------------- parsing


def known_keys(parser: jsonargparse.ArgumentParser) -> set[str]:
    """Every key that a flag or a file may set."""
    return set(parser.get_defaults(skip_validation=True).keys()) - {"config", "print_config", "json", "explain"}


def parse(
    parser: jsonargparse.ArgumentParser, selection: Selection, targets: Iterable[str] = ()
) -> jsonargparse.Namespace:
    """Parse what was selected. Raises ConfigurationError with one message for everything a user can get wrong.

    ``targets`` as in `build_parser`."""
    known = known_keys(parser)
    check_keys(selection, known)
    config = selection.settings.values
    arguments = ["--config", json.dumps(config, default=str)] if config else []
    try:
        values = parser.parse_args([*arguments, *(f"--{flag.key}={flag.value}" for flag in selection.flags)])
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"{said_of(error, selection)}\nSee {parser.prog} --help.") from error
    if missing := [key for key in _must_be_given(selection, set(targets)) if values.get(key) is None]:
        raise ConfigurationError(f"{must_be_given(missing)}\nSee {parser.prog} --help.")
    return values


def _must_be_given(selection: Selection, targets: set[str]) -> list[str]:
    """Arguments without a default that nobody gave; jsonargparse takes None for what is untyped or may be None."""
    given = {flag.key for flag in selection.flags} | set(selection.settings.origins) | targets
    return [
        f"{key}.{name}"
        for slot in selection.slots.values()
        for key in selection.keys_of(slot)
        if (target := selection.targets.get(key)) is not None
        for name in _required(target)
        if name not in (*_first(target, slot.skip), *slot.filled) and f"{key}.{name}" not in given
    ]
