"""SLURM's compressed lists, read without ``scontrol``: ``node[01-03,07],gpu-a[1,3]-b`` and ``2(x3),1``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from ..errors import ConfigurationError

_PIECES = re.compile(r"\[([^\[\]]*)\]|([^,\[\]]+)|(,)|(.)")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts(text: str) -> list[str]:
    """The host names of a list, in its order; of several brackets in a name the last one runs fastest."""
    found: list[str] = []
    name: list[list[str]] = []
    for brackets, plain, comma, stray in _PIECES.findall(text.strip()):
        if stray or (brackets == plain == comma == ""):
            raise _unreadable(text)
        if comma:
            found += _joined(name, text)
            name = []
        else:
            name.append([plain] if plain else list(_ranges(brackets, text)))
    return found + _joined(name, text)


def counts(text: str) -> list[int]:
    """The number of tasks on each node: ``2(x3),1`` is [2, 2, 2, 1]."""
    found: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(f"{text!r} is not a list of tasks per node; expected one such as '2(x3),1'.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _joined(name: list[list[str]], text: str) -> list[str]:
    if not name:
        raise _unreadable(text)
    return ["".join(parts) for parts in itertools.product(*name)]


def _ranges(inside: str, text: str) -> Iterator[str]:
    for part in inside.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
            raise _unreadable(text)
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _unreadable(text: str) -> ConfigurationError:
    return ConfigurationError(f"{text!r} is not a list of nodes; expected one such as 'node[01-03,07],gpu1'.")
