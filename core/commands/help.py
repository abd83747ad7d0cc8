"""How the help of a command looks: flags as they are typed, and no more about their types than a user wants to know."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Mapping
from typing import Any

import jsonargparse

_WORD = r"(?:int|float|str|bool|null|Any|any|Path|timedelta|dict|list|tuple|Mapping|Literal|Optional"
_WORD += r"|PathLike|Tensor|Profiler)"
_PLAIN = rf"{_WORD}(?:\[[^()]*?\])?(?: \| {_WORD}(?:\[[^()]*?\])?)*"

# In an expanded help text: what is cut out or put more shortly.
_SHORTER = (
    (re.compile(r", known subclasses: [^)]*"), ""),
    (
        re.compile(r"\bUnion\[((?:[^\[\]]|\[[^\]]*\])*)\]"),
        lambda match: " | ".join(re.split(r", (?![^\[]*\])", match[1])),
    ),
    (re.compile(r"Optional\[Untyped\]|Untyped"), "any"),
    (re.compile(r"``([^`]*)``"), r"\1"),
    (re.compile(r":\w+:`([^`<]*)[^`]*`"), r"\1"),
    (re.compile(r" ?\(default: [^()]*(?:\([^()]*\))?\)(?=.*\(type:)"), ""),  # a docstring's own, beside the real one
    (re.compile(rf"(\(|, )type: {_PLAIN}(?:, |(?=\)))"), r"\1"),  # the placeholder says that
    (re.compile(r",? ?\bdefault: (null|False)?\)$"), ")"),
    (re.compile(r" Default: [^ ]+\.?(?= \(default: )"), ""),  # a docstring's own
    (re.compile(r"\bdefault: True\)$"), "default: true)"),
    (re.compile(r", \)$"), ")"),
    (re.compile(r" ?\(\)$"), ""),
)
_PLACEHOLDERS = {"int": "INT", "float": "NUMBER", "bool": "BOOL"}


class HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """A formatter that shows ``--strategy.name NAME`` as ``--strategy NAME``, where ``typed`` says so."""

    typed: Mapping[str, str] = {}

    def add_argument(self, action: Action) -> None:
        if not any(flag.endswith(".help") for flag in action.option_strings):
            super().add_argument(action)

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        kinds = [kind for kind in (self._get_type_str(action) or "").split(" | ") if kind != "null"]
        if kinds and all(kind in _PLACEHOLDERS for kind in kinds):
            names = [_PLACEHOLDERS[kind] for kind in kinds]
            return "NUMBER" if names == ["INT", "NUMBER"] else "|".join(names)
        return str(super()._get_default_metavar_for_optional(action))

    def _format_action_invocation(self, action: Action) -> str:
        text: str = re.sub(r", --\S+\+ .*", "", super()._format_action_invocation(action))  # --devices+ and its like
        for long, short in self.typed.items():
            text = text.replace(long, short)
        return re.sub(r" (?=[A-Z_]{16,}$)\S+", " VALUE", text)

    def _expand_help(self, action: Action) -> str:
        text: str = " ".join(super()._expand_help(action).split())
        for pattern, shorter in _SHORTER:
            text = pattern.sub(shorter, text)
        return text


def formatter(typed: Mapping[str, str]) -> type[Any]:
    """A formatter for one parser."""
    longest_first = dict(sorted(typed.items(), key=lambda item: -len(item[0])))
    return type("Formatter", (HelpFormatter,), {"typed": longest_first})
