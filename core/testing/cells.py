"""The cells of the matrix, which of them negotiation admits, and which ones a default run takes.

Strategies and precisions are those that the distribution trivet registers: a new one joins by its entry point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations, product

from .. import registry
from ..capabilities import resolve
from ..errors import PlanError, PluginBroken
from ..launch.world import World
from .checks import CHECKS, checks_of
from .subject import Cell

WORLD_SIZES = (1, 2, 4)

Item = tuple[Cell, str]  # a cell and the name of a check


@cache
def uninstalled(kind: str) -> dict[str, str]:
    """Plugins of ours that want a package which is not installed here, and what they say of it."""
    reasons = {}
    for entry in registry.entries(kind):
        try:
            if entry.distribution == "trivet":
                registry.make(kind, entry.qualified)
        except PluginBroken as error:
            if "Install it with" in str(error):  # anything else is ours to fix: `outcomes` raises it again
                reasons[entry.name] = str(error)
    return reasons


@cache
def own(kind: str) -> tuple[str, ...]:
    """The names that Trivet itself registers, as far as they can be used here."""
    listed = [entry.name for entry in registry.entries(kind) if entry.distribution == "trivet"]
    return tuple(name for name in listed if name not in uninstalled(kind))


def all_cells() -> list[Cell]:
    return [Cell(s, p, w) for s, p, w in product(own("strategy"), own("precision"), WORLD_SIZES)]


def outcome(cell: Cell) -> str:
    """``ok``, or ``refused:`` with every conflict, but without versions and remedies."""
    world = World(0, cell.world_size, 0, cell.world_size, 0, 1, "torchrun")
    try:
        resolve(
            strategy=cell.strategy, accelerator=cell.accelerator, precision=cell.precision, devices=cell.world_size,
            world=world,
        )  # fmt: skip
    except PlanError as error:
        return "refused: " + refusal(error)
    return "ok"


def refusal(error: PlanError) -> str:
    """The conflicts, without versions and remedies."""
    texts = [f"{' and '.join(conflict.parties)}: {conflict.reason}" for conflict in error.conflicts]
    return re.sub(r" \(trivet [^)]*\)", "", " | ".join(texts))


def outcomes() -> dict[str, str]:
    return {str(cell): outcome(cell) for cell in all_cells()}


def items(cells: Iterable[Cell]) -> list[Item]:
    """Every check of every cell."""
    return [(cell, check.name) for cell in cells for check in checks_of(cell)]


def cover(everything: Sequence[Item]) -> list[Item]:
    """Few items that hold every pair of values (strategy, precision, world size, check) that occurs in any item.

    Greedy, and the same for the same items: the item with the most new pairs comes next; where two have as many, one of
    two processes, the smallest number that communicates.
    """

    def pairs(item: Item) -> set[tuple[tuple[int, object], ...]]:
        cell, check = item
        return set(combinations(enumerate((cell.strategy, cell.precision, cell.world_size, check)), 2))

    chosen: list[Item] = []
    missing = set().union(*map(pairs, everything))
    while missing:
        best = max(everything, key=lambda item: (len(pairs(item) & missing), item[0].world_size == 2))
        chosen.append(best)
        missing -= pairs(best)
    return [item for item in everything if item in chosen]


def table(results: Mapping[Item, str], known: Mapping[str, str]) -> list[str]:
    """A Markdown table: one row per strategy and precision, and in each cell what its checks said.

    ``known``: what negotiation says of each cell, as `outcomes` gives it.
    """
    lines = ["| strategy | precision | " + " | ".join(f"W = {w}" for w in WORLD_SIZES) + " |"]
    lines.append("|---|---|" + "---|" * len(WORLD_SIZES))
    for strategy, precision in product(own("strategy"), own("precision")):
        row = []
        for world_size in WORLD_SIZES:
            cell = Cell(strategy, precision, world_size)
            ran = {check: results[cell, check] for check in CHECKS if (cell, check) in results}
            failed = [check for check, result in ran.items() if result != "ok"]
            if known.get(str(cell), "ok") != "ok":
                row.append("refused")
            elif failed:
                row.append("FAILED: " + ", ".join(failed))
            else:
                row.append(f"{len(ran)} of {len(checks_of(cell))} ok" if ran else "left out")
        lines.append(f"| {strategy} | {precision} | " + " | ".join(row) + " |")
    refusals = sorted({text for text in known.values() if text != "ok"})
    notes = [
        *refusals,
        *(f"left out: {text}" for kind in ("strategy", "precision") for text in uninstalled(kind).values()),
    ]
    return [*lines, *([""] if notes else []), *notes]
