"""Tables of which few cases run by default, and how many that leaves out; TRIVET_CI_FULL=1 runs all."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from full import FULL

COUNTS: dict[str, tuple[int, int]] = {}  # by the name of the table: cases that run, and all

T = TypeVar("T")


def chosen(table: str, every: Collection[T], few: Collection[T]) -> Collection[T]:
    """The cases of a table that run."""
    cases = every if FULL else few
    count(table, len(cases), len(every))
    return cases


def count(table: str, ran: int, every: int) -> None:
    before = COUNTS.get(table, (0, 0))
    COUNTS[table] = (before[0] + ran, before[1] + every)


def summary() -> list[str]:
    """A line for each table of which something is left out."""
    return [
        f"Checkpoints: {ran} of {every} cases of {table}, {every - ran} left out; TRIVET_CI_FULL=1 runs all."
        for table, (ran, every) in COUNTS.items()
        if ran < every
    ]
