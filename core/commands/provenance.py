"""``--explain``: who set a value, and what it would be without them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ..errors import ConfigurationError
from .links import Filling
from .mistakes import nearest, plain
from .selection import Selection
from .text import table


def explain_values(
    key: str,
    flat: Mapping[str, Any],
    defaults: Mapping[str, Any],
    selection: Selection,
    links: Filling,
    script: Container[str] = (),
) -> str:
    """The sources of a key, or of all below it, the one that rules last; without a key, of all that somebody set.

    ``script`` are the keys whose defaults are a script's.
    """
    wanted = key.removeprefix("--").removeprefix("trainer.").replace(".init_args", "")
    wanted = "seed" if wanted == "seed_everything" else wanted
    waiting = {link.target: link for link in links.links}
    names = [name for name in flat if wanted in ("", name, plain(name)) or name.startswith(f"{wanted}.")]
    if not names:
        names = [name for name in flat if plain(name).startswith(f"{wanted}.")]
    if not names:
        raise ConfigurationError(f"--explain {key}: there is no such key.{nearest(wanted, flat, '')}")
    lines = []
    for name in names:
        value = LATER if name in waiting else shown(flat[name])
        said = chain(name, defaults, selection, script)
        if link := waiting.get(name) or links.filled.get(name):
            said.append((value, str(link)))
        else:
            said += _flags(name, selection)
        if wanted or len(said) > 1 or name not in defaults or name in script:
            lines += [f"{plain(name)} = {value}", *table(_marked(said), indent="  ")]
    return "\n".join(lines) or "every value is its default"


LATER = "(known when its source is made)"


def chain(
    name: str, defaults: Mapping[str, Any], selection: Selection, script: Container[str]
) -> list[tuple[str, str]]:
    """Value and source, from the default up, without links and flags, of which one rules."""
    source = "the default of the script" if name in script else "the default"
    found = [(shown(defaults[name]), source)] if name in defaults else []
    return found + [(shown(origin.value), origin.source) for origin in _origins(name, selection)]


def _flags(name: str, selection: Selection) -> list[tuple[str, str]]:
    keys = (name, name.replace(".init_args", ""))
    return [(flag.value, flag.shown) for flag in selection.flags if flag.key in keys]


def _origins(name: str, selection: Selection) -> list[Any]:
    """A mapping that was given as a whole is the origin of what is in it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        found = selection.settings.origins.get(".".join(parts[:count]))
        if found:
            return found
    return []


def _marked(said: list[tuple[str, str]]) -> list[tuple[str, str]]:
    *before, (value, source) = said
    return [*before, (value, f"{source}  <- rules" if before else source)]


def shown(value: Any) -> str:
    """A value as YAML has it, in one line."""
    import yaml  # type: ignore[import-untyped]

    try:
        text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    except yaml.YAMLError:
        return repr(value)
    return text.removesuffix("\n...\n").strip()
