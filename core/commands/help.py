"""How the help of a command looks: flags as they are typed, and no more about their types than a user wants to know."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Mapping
from typing import Any

import jsonargparse

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
    (re.compile(r"type: str \| null, default: "), "default: "),
    (re.compile(r", default: null\)"), ", by default none)"),
    (re.compile(r" ?\(default: (null|False)\)$"), ""),
)


class HelpFormatter(jsonargparse.DefaultHelpFormatter):
    """A formatter that shows ``--strategy.name NAME`` as ``--strategy NAME``, where ``typed`` says so."""

    typed: Mapping[str, str] = {}

    def add_argument(self, action: Action) -> None:
        if not any(flag.endswith(".help") for flag in action.option_strings):
            super().add_argument(action)

    def _format_action_invocation(self, action: Action) -> str:
        text: str = super()._format_action_invocation(action)
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
