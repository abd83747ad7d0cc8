"""Which world this process belongs to: every installed environment is asked, and at most one may say that it is its."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .. import registry
from ..errors import ConfigurationError, PluginError, TrivetError
from .environment import Environment
from .world import LAUNCH_DIR, World

CHOICE = "TRIVET_ENVIRONMENT"
"""Names the one environment that counts, or ``none``: for machines where two of them recognise themselves."""


@dataclass(frozen=True)
class Answer:
    """What one environment says of this process. ``world`` is None where it did not start it."""

    entry: registry.Entry
    world: World | None
    reasons: tuple[str, ...]


def detect(environ: Mapping[str, str] | None = None) -> World | None:
    """Return the world that an environment announced to this process, or None where no launcher did.

    ``environ`` is ``os.environ`` by default. In workers that a launcher of Trivet's started, nobody is asked. Raises
    ConfigurationError where two environments recognise themselves, naming both, and what an environment raises.
    """
    values = os.environ if environ is None else environ
    if values.get(LAUNCH_DIR):
        return None
    answers = [answer for answer in ask(values) if answer.world is not None]
    if len(answers) > 1:
        sides = "; ".join(f"{answer.entry} ({', '.join(answer.reasons)})" for answer in answers)
        names = " or ".join(answer.entry.name for answer in answers)
        raise ConfigurationError(
            f"{len(answers)} environments say that they started this process: {sides}. Unset the variables of those "
            f"that did not, or set {CHOICE} to the one that did: {names}."
        )
    return answers[0].world if answers else None


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
            environment = registry.make("environment", entry.qualified).plugin
        except (PluginError, ConfigurationError) as error:
            if choice:
                raise
            warnings.warn(f"{error} It was not asked whether it started this process.", stacklevel=2)
            continue
        answer = _answer(entry, environment, environ)
        if choice and answer.world is None:
            raise ConfigurationError(
                f"{CHOICE}={choice!r}, but {entry} did not start this process: {', '.join(answer.reasons)}."
            )
        yield answer


def _answer(entry: registry.Entry, environment: Environment, environ: Mapping[str, str]) -> Answer:
    try:
        world = environment.detect(environ)
        reasons = tuple(environment.reasons(environ))
    except TrivetError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{entry} raised {type(error).__name__} while it looked for the processes that it starts: {error}. "
            f"Set {CHOICE} to another environment, or to 'none'."
        ) from error
    if world is not None and not isinstance(world, World):
        raise ConfigurationError(f"{entry} says that this process's world is {world!r}. Expected a World, or None.")
    return Answer(entry, None if world is None else replace(world, source=entry.name), reasons)
