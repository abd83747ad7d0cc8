"""Which world this process belongs to: every installed environment is asked, and at most one may say that it is its."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .. import registry
from ..errors import ConfigurationError, PluginError, PluginInvalid, TrivetError
from .environment import Environment, Node
from .world import LAUNCH_DIR, World

CHOICE = "TRIVET_ENVIRONMENT"
"""Names the one environment that counts, or ``none``: for machines where two of them recognise themselves."""


@dataclass(frozen=True)
class Answer:
    """What one environment says of this process. ``world`` is None where it did not start it, or only the machine's
    first process; ``node`` then says which machine."""

    entry: registry.Entry
    world: World | None
    reasons: tuple[str, ...]
    node: Node | None = None
    hint: str = ""


def detect(environ: Mapping[str, str] | None = None) -> World | None:
    """Return the world that an environment announced to this process, or None where no launcher did.

    ``environ`` is ``os.environ`` by default. In workers that a launcher of Trivet's started, nobody is asked. Raises
    ConfigurationError where two environments recognise themselves, naming both, and what an environment raises.
    """
    found = _the_one(environ)
    return None if found is None else found.world


def node(environ: Mapping[str, str] | None = None) -> Node | None:
    """Which machine this is, where an environment started one process on each and no world; else None.

    What these facts mean: the process that reads them starts those of its machine, as ``--num_nodes``, ``--node_rank``
    and ``--main_address`` ask of the local launcher. Raises what `detect` raises.
    """
    found = _the_one(environ)
    return None if found is None else found.node


def hints(environ: Mapping[str, str] | None = None) -> list[str]:
    """Why this single process may have been meant as one of several: ``"slurm: ..."``."""
    return [f"{answer.entry.name}: {answer.hint}" for answer in _answers(environ) if answer.hint]


def _answers(environ: Mapping[str, str] | None) -> tuple[Answer, ...]:
    values = os.environ if environ is None else environ
    return () if values.get(LAUNCH_DIR) else _kept(frozenset(values.items()), tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _kept(variables: frozenset[tuple[str, str]], path: tuple[str, ...]) -> tuple[Answer, ...]:
    """Kept, since every run asks several times; what is installed changes with ``path``."""
    return tuple(ask(dict(variables)))


def _the_one(environ: Mapping[str, str] | None) -> Answer | None:
    answers = [answer for answer in _answers(environ) if answer.world is not None or answer.node is not None]
    if len(answers) > 1:
        sides = "; ".join(f"{answer.entry} ({', '.join(answer.reasons)})" for answer in answers)
        names = " or ".join(answer.entry.name for answer in answers)
        raise ConfigurationError(
            f"{len(answers)} environments say that they started this process: {sides}. Unset the variables of those "
            f"that did not, or set {CHOICE} to the one that did: {names}."
        )
    return answers[0] if answers else None


def ask(environ: Mapping[str, str]) -> Iterator[Answer]:
    """Ask every installed environment, or only the one that ``TRIVET_ENVIRONMENT`` names.

    One that cannot be loaded is left out with a warning: it may belong to a package that has nothing to do with this
    run.
    """
    choice = environ.get(CHOICE, "")
    if choice == "none":
        return
    for entry in [registry.find("environment", choice)] if choice else registry.entries("environment"):
        try:
            found = answer(entry, environ)
        except PluginError as error:
            if choice:
                raise
            warnings.warn(f"{error} It was not asked whether it started this process.", stacklevel=2)
            continue
        if choice and found.world is None and found.node is None:
            raise ConfigurationError(
                f"{CHOICE}={choice!r}, but {entry} did not start this process: {', '.join(found.reasons)}."
            )
        yield found


def answer(entry: registry.Entry, environ: Mapping[str, str]) -> Answer:
    """Ask one environment. Raises what it raises, and PluginError where it cannot be used."""
    try:
        environment: Environment = registry.make("environment", entry).plugin
    except ConfigurationError as error:
        raise PluginInvalid(str(error)) from error
    try:
        world = environment.detect(environ)
        node = environment.node(environ) if world is None else None
        reasons = tuple(environment.reasons(environ))
        hint = environment.hint(environ) if world is None and node is None else ""
    except TrivetError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{entry} raised {type(error).__name__} while it looked for the processes that it starts: {error}. "
            f"Set {CHOICE} to another environment, or to 'none'."
        ) from error
    for what, kind, value in (("world", World, world), ("node", Node, node)):
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(
                f"{entry} says that this process's {what} is {value!r}. Expected a {kind.__name__}, or None."
            )
    return Answer(
        entry,
        None if world is None else replace(world, source=entry.name),
        reasons,
        None if node is None else replace(node, source=entry.name),
        hint,
    )
