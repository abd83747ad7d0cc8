"""Settings: what defaults, files and environment say, one on top of the other, and who said it.

Slots are brought into one form, whatever theirs was, so that later layers can change single options:

    strategy: ddp                                   {"strategy": {"name": "ddp"}}
    model: {class_path: pkg.Net, init_args: {...}}  {"model": {"class_path": "pkg.Net", ...}}
    callbacks: [EarlyStopping]                      {"callbacks": {"0": {"class_path": "early_stopping"}}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from .entry import COMMANDS
from .slots import Slot, canonical_name, path_of


class Origin(NamedTuple):
    """Somebody who set a value: ``source`` is a file, an environment variable or a flag."""

    source: str
    value: Any


class Settings:
    """``values`` as nested mappings, and for each key that is set the ``origins`` of its value; the last one rules.

    ``fixed`` are the classes that the script itself has given.
    """

    def __init__(self, slots: Mapping[str, Slot], fixed: Mapping[str, Callable[..., Any]], command: str) -> None:
        self.slots, self.fixed, self.command = slots, fixed, command
        self.values: dict[str, Any] = {}
        self.origins: dict[str, list[Origin]] = {}
        self.links: list[tuple[str, Any]] = []  # what files declare: where, and the mapping

    # ---------------------------------------------------------------------------------------------------------- layers

    def merge(self, layer: Mapping[str, Any], source: str) -> None:
        """Put a layer on top. Raises ConfigurationError for what cannot be a slot's value."""
        for key, value in self._flat(layer):
            name, plus = key.removesuffix("+"), key.endswith("+")
            if key == "seed_everything":  # Lightning's word, whose yes and no are no seeds
                self._put(self.values, "seed", None if isinstance(value, bool) else value, "seed", source)
            elif name == "links":
                self.links.append((source, value))
            elif name in self.slots:
                self.fill(self.slots[name], value, source, append=plus)
            else:
                self._put(self.values, name, value, name, source)

    def _flat(self, layer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The items of a layer; Lightning's ``trainer:``, and what a file holds for single commands, are unfolded."""
        for key, value in layer.items():
            section = isinstance(value, Mapping) and key in (*COMMANDS, "trainer")
            if section and key in (self.command, "trainer"):
                yield from self._flat(value)
            elif not section:
                head, dot, rest = str(key).partition(".")
                if dot:
                    yield from self._flat({head: {rest: value}})
                elif key != "links" and isinstance(value, Mapping) and any("." in str(inner) for inner in value):
                    yield key, _nested(value)
                else:
                    yield key, value

    def fill(self, slot: Slot, value: Any, source: str, *, append: bool = False) -> None:
        """Fill a slot, whatever the form of the value. With ``append``, beside what a slot for several holds."""
        if not slot.several:
            if value is not None:
                self._put(self.values, slot.key, self.entry(slot, value), slot.key, source)
            return
        if slot.kind == "logger" and isinstance(value, bool):
            self._forget(slot.key)
            self.values[slot.key] = value
            self.origins[slot.key] = [Origin(source, value)]
            return
        if value is None:
            self._forget(slot.key)
            self.values.pop(slot.key, None)
            return
        given = value if isinstance(value, list) else [value]
        held = self.values.get(slot.key)
        held = held if append and isinstance(held, dict) else {}
        if not append:
            self._forget(slot.key)
        self.values[slot.key] = held
        for one in given:
            number = str(len(held))
            held[number] = {}
            self._put(held, number, self.entry(slot, one), f"{slot.key}.{number}", source)

    def entry(self, slot: Slot, value: Any) -> dict[str, Any]:
        """One selecting value as ``{selector: name, option: value, ...}``."""
        if slot.spell is not None:
            value = slot.spell(value)
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            value = {slot.selector: str(value)}
        if not isinstance(value, Mapping):
            raise ConfigurationError(
                f"{slot.key}={value!r}. Expected a name, or a mapping with {slot.selector!r} and options."
            )
        options = {str(key): one for key, one in value.items()}
        name = options.pop("class_path", None)
        if name is None and slot.kind:
            name = options.pop("name", None)
        options |= options.pop("init_args", None) or {}
        options |= options.pop("dict_kwargs", None) or {}
        if slot.key in self.fixed:
            own = path_of(self.fixed[slot.key])
            if name is not None and name not in (own, self.fixed[slot.key].__qualname__):
                raise ConfigurationError(
                    f"--{slot.key} {name!r}: this script's {slot.key} is {own!r}. Use `trivet` to run another one."
                )
        elif name is not None:
            options = {slot.selector: canonical_name(slot, name), **options}
        return options

    # --------------------------------------------------------------------------------------------------------- inside

    def _put(self, held: dict[str, Any], key: str, value: Any, path: str, source: str) -> None:
        """Set ``held[key]``, mapping by mapping; options of a class that is no longer selected are dropped."""
        old = held.get(key)
        if not isinstance(value, Mapping) or not value:
            held[key] = value
            self.origins.setdefault(path, []).append(Origin(source, value))
            return
        selector = self.slots[path].selector if path in self.slots else "class_path"
        if not isinstance(old, dict):
            held[key] = old = {}
        elif selector in old and selector in value and old[selector] != value[selector]:
            self._forget(path, but=selector)
            held[key] = old = {}
        for inner, one in value.items():
            self._put(old, str(inner), one, f"{path}.{inner}", source)

    def _forget(self, path: str, but: str = "") -> None:
        for key in [key for key in self.origins if key == path or key.startswith(f"{path}.")]:
            if key != f"{path}.{but}":
                del self.origins[key]


def _nested(value: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    found: dict[str, Any] = {}
    for key, one in value.items():
        *heads, last = str(key).split(".")
        inner = found
        for head in heads:
            inner = inner.setdefault(head, {})
        inner[last] = one
    return found


def read_file(path: str) -> dict[str, Any]:
    """A configuration file."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"--config {path!r} cannot be read: {reason}.") from error
    loaded = read_yaml(text, f"--config {path!r}")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigurationError(
            f"--config {path!r} holds {type(loaded).__name__!r}. Expected a mapping of flags to values."
        )
    return loaded


def read_yaml(text: str, where: str) -> Any:
    import yaml  # type: ignore[import-untyped]
    from jsonargparse import get_loader

    try:
        return get_loader("yaml")(text)  # unlike PyYAML's own, it reads 1e-3 as a number
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{where} is not YAML: {error}") from error
