"""From the words of a command line to settings and flags, and to the classes that they select.

A parser can only offer ``--strategy.static_graph`` when it knows that the strategy is ``ddp``. So what selects is read
first, wherever it stands: in files, in the environment, and among the flags. Only what is selected is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from .script import Script
from .settings import Settings, read_file, read_yaml
from .slots import Slot, target_of

BARE = frozenset({"--help", "-h", "--json", "--explain", "--print_config"})  # flags that stand without a value
COMMAND_LINE = "the command line"


class Flag(NamedTuple):
    """One option: a flag or an environment variable. ``shown`` is how the user wrote it."""

    key: str
    value: str
    shown: str
    environment: bool


@dataclass
class Selection:
    """What a command line says.

    ``settings``: defaults, files and everything that selects. ``flags``: the other options, the later ones on top.
    ``bare``: the flags without a value, each with what followed it. ``targets``: the class, or a plugin's factory
    function, by key; ``callbacks.0`` is the first of several. ``slots``: the slot of each of these keys.
    """

    settings: Settings
    flags: list[Flag] = field(default_factory=list)
    bare: dict[str, str] = field(default_factory=dict)
    targets: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def slots(self) -> Mapping[str, Slot]:
        return self.settings.slots

    def keys_of(self, slot: Slot) -> list[str]:
        """The keys of what fills a slot: its own, or one for each of several."""
        held = self.settings.values.get(slot.key)
        if not slot.several:
            return [slot.key]
        return [f"{slot.key}.{number}" for number in held] if isinstance(held, dict) else []


def select(
    command: str, argv: Sequence[str], script: Script, slots: Mapping[str, Slot], environ: Mapping[str, str]
) -> Selection:
    """Read files, environment and flags; import what they select."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # `trivet`, unlike `python -m trivet`, starts without it
    settings = Settings(slots, script.fixed, command)
    selection = Selection(settings)
    options = [*_variables(command, environ), *_options(command, argv, selection.bare)]
    settings.merge(script.layer(slots), "the script")
    for path in [option.value for option in options if option.key == "config"]:
        settings.merge(read_file(path), path)
    _say_twice(options, slots)
    cleared: set[str] = set()
    for option in options:
        if option.key != "config":
            _take(selection, option, cleared)
    for slot in slots.values():
        for key in selection.keys_of(slot):
            _resolve(selection, slot, key)
    return selection


def _variables(command: str, environ: Mapping[str, str]) -> Iterator[Flag]:
    """Options out of the environment: ``TRIVET_FIT__MODEL__LR`` is ``--model.lr`` of fit, and of its plan."""
    prefix = f"TRIVET_{'FIT' if command == 'plan' else command.upper()}__"
    for name in sorted(environ):
        if name.startswith(prefix):
            key = name.removeprefix(prefix).lower().replace("__", ".")
            yield Flag(_plain_key(key), environ[name], name, True)


def _options(command: str, argv: Sequence[str], bare: dict[str, str]) -> Iterator[Flag]:
    tokens, alone = list(argv), BARE if command == "plan" else BARE - {"--json"}
    while tokens:
        token = tokens.pop(0)
        name, equals, value = token.partition("=")
        if name in alone:
            if equals and name != "--explain":
                raise ConfigurationError(f"{token} has a value, and {name} takes none.")
            follows = name == "--explain" and _is_key(tokens, alone)
            bare[name] = value if equals else tokens.pop(0) if follows else ""
            continue
        name = {"-c": "--config"}.get(name, name)
        if not name.startswith("--") or name == "--":
            raise ConfigurationError(
                f"{token!r} belongs to no flag. Expected --flag value, or --flag=value, one value each; a list is "
                "written '[a, b]'."
            )
        if name in BARE:
            raise ConfigurationError(f"{name} belongs to `trivet plan`.")
        if not equals:
            if not tokens or tokens[0].startswith("--"):
                near = get_close_matches(name, alone, n=1, cutoff=0.75)
                why = f"is not known. Did you mean {near[0]}?" if near else "was given without a value."
                raise ConfigurationError(f"{name} {why}" + ("" if near else " A switch is given as true or false."))
            value = tokens.pop(0)
        yield Flag(_plain_key(name.removeprefix("--")), value, name, False)


def _say_twice(options: Sequence[Flag], slots: Mapping[str, Slot]) -> None:
    """Say which of two flags with the same key rules: the last, so that a script's flags may be followed by others."""
    given: dict[str, Flag] = {}
    for option in (option for option in options if not option.environment and option.key != "config"):
        head = option.key.partition(".")[0].removesuffix("+")
        several = option.key.endswith("+") or (head in slots and slots[head].several)
        before = given.get(option.key)
        given[option.key] = option
        if not several and before is not None and before.value != option.value:
            print(
                f"trivet: {option.shown} is given twice, as {before.value!r} and {option.value!r}. The last one rules.",
                file=sys.stderr,
                flush=True,
            )


def _is_key(tokens: Sequence[str], alone: Container[str]) -> bool:
    """Whether the next word is a key, also where it is written as a flag that has no value."""
    if not tokens or tokens[0] in alone or "=" in tokens[0]:
        return False
    return not tokens[0].startswith("-") or len(tokens) == 1 or tokens[1].startswith("--")


def _plain_key(key: str) -> str:
    """A key in our own spelling: without Lightning's ``trainer.``, and with ``_`` for ``-``."""
    key = key.replace("-", "_").removeprefix("trainer.")
    return "seed" if key == "seed_everything" else key


def _take(selection: Selection, option: Flag, cleared: set[str]) -> None:
    """Let an option select, or keep it for the parser. ``cleared``: slots for several that the flags began anew."""
    settings = selection.settings
    head, _, rest = option.key.partition(".")
    append, head = head.endswith("+"), head.removesuffix("+")
    slot = settings.slots.get(head)
    if slot is None:
        selection.flags.append(option)
        return
    rest = rest.removeprefix("init_args.")
    keys = selection.keys_of(slot)
    if rest in ("", "class_path", slot.selector):
        append = append or (head in cleared and not option.environment)
        before = _selected(settings, slot)
        settings.fill(slot, _selecting(option, slot), option.shown, append=append)
        if not option.environment:
            cleared.add(head)
            if not append and (keys if slot.several else before not in (None, _selected(settings, slot))):
                # what the environment says is for what it, or a file, selects
                selection.flags = [f for f in selection.flags if not (f.environment and f.key.startswith(f"{head}."))]
        return
    if slot.several:
        number, _, inner = rest.partition(".")
        if not number.isdigit():
            if not keys:
                raise ConfigurationError(_none_selected(option, slot))
            number, inner = keys[-1].rpartition(".")[2], rest
        rest = f"{number}.{inner.removeprefix('init_args.')}"
    selection.flags.append(option._replace(key=f"{head}.{rest}"))


def _selecting(option: Flag, slot: Slot) -> Any:
    text = option.value
    if text[:1] in "{[" or (slot.several and text in ("true", "false", "True", "False", "null")):
        return read_yaml(text, option.shown)
    return text


def _selected(settings: Settings, slot: Slot) -> Any:
    held = settings.values.get(slot.key)
    return held.get(slot.selector) if isinstance(held, dict) else None


def _none_selected(option: Flag, slot: Slot) -> str:
    article = "an" if slot.what[0] in "aeio" else "a"
    name = "NAME" if slot.kind else "CLASS"
    return (
        f"{option.shown} is an option of {article} {slot.what}, but none is selected. Add --{slot.key} {name}"
        f"{' before it' if slot.several else ''}."
    )


def _resolve(selection: Selection, slot: Slot, key: str) -> None:
    settings = selection.settings
    if slot.key in settings.fixed:
        selection.targets[key] = settings.fixed[slot.key]
        return
    held: Any = settings.values
    for part in key.split("."):
        held = held.get(part) or {}
    name = held.get(slot.selector) or slot.default or None
    if name is None and (slot.several or held):
        source = settings.origins[f"{key}.{next(iter(held))}"][-1].source if held else ""
        raise ConfigurationError(
            f"{key} names no {'plugin' if slot.kind else 'class'}{f' ({source})' if source else ''}. Add "
            f"{slot.selector!r} to its options {held!r}."
        )
    target = None if name is None else target_of(slot, name)
    if target is not None:
        selection.targets[key] = target
        return
    for flag in selection.flags:
        if flag.key.startswith(f"{key}."):
            raise ConfigurationError(_none_selected(flag, slot))
