"""The parser of commands that run no model: argparse, with one line for a mistake, and the nearest word in it."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import Any, NoReturn

from ..errors import ConfigurationError


class Words(argparse.ArgumentParser):
    """Raises ConfigurationError where argparse would print its usage and end the process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{self._shorter(message)} {self.prog} --help lists all.")

    def _shorter(self, message: str) -> str:
        if unknown := re.match(r"unrecognized arguments: (\S+)", message):
            word = unknown[1].partition("=")[0]
            known = [name for name in self._option_string_actions if name.startswith("--")]
            return f"{word} is not known.{_guess(word, known)}"
        if wrong := re.match(r"argument (\S+): invalid choice: '([^']*)'", message):
            allowed = next(action.choices for action in self._actions if wrong[1] in (action.metavar, action.dest))
            names = [str(name) for name in allowed or ()]
            return f"there is no {wrong[1].lower()} {wrong[2]!r}.{_guess(wrong[2], names)} Allowed: {', '.join(names)}."
        return f"{message}."


def _guess(word: str, names: list[str]) -> str:
    near = get_close_matches(word, names, n=1)
    return f" Did you mean {near[0]}?" if near else ""
