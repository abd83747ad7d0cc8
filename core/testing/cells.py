"""The cells of the matrix, which of them negotiation admits, and which ones a short run takes.

Counterparts are the plugins that the distribution trivet registers: a new one joins by its entry point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

from .. import registry
from ..capabilities import resolve
from ..errors import PlanError, PluginBroken
from ..launch.world import World
from .apart import APART
from .checks import CHECKS, Check
from .subject import Cell, made
from .tolerance import UNDECLARED, Terms
from .unlike import UNLIKE

WORLD_SIZES = (1, 2, 4)
TOGETHER = {**CHECKS, **UNLIKE}  # of plugins whose ranks are alike after every update

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
def unavailable() -> dict[str, str]:
    """Accelerators of ours that this machine does not have, and why."""
    plugins = {name: made("accelerator", name).plugin for name in own("accelerator")}
    return {name: plugin.unavailable_reason() for name, plugin in plugins.items() if not plugin.is_available()}


@cache
def own(kind: str) -> tuple[str, ...]:
    """The names that Trivet itself registers, as far as their packages are installed here."""
    listed = [entry.name for entry in registry.entries(kind) if entry.distribution == "trivet"]
    return tuple(name for name in listed if name not in uninstalled(kind))


def here(kind: str) -> tuple[str, ...]:
    """The names that Trivet itself registers, as far as they can be used here."""
    return tuple(name for name in own(kind) if kind != "accelerator" or name not in unavailable())


def all_cells() -> list[Cell]:
    """Trivet's own strategies and precisions, on the CPU."""
    return [Cell(s, p, w) for s, p, w in product(own("strategy"), own("precision"), WORLD_SIZES)]


def outcome(cell: Cell, check: Check | None = None) -> str:
    """``ok``, or ``refused:`` with every conflict, but without versions and remedies.

    With a check: what negotiation says of the run that it wants. Asked once for each, since most suites ask the same.
    """
    return _outcome(cell, tuple((check.asks if check is not None else {}).items()))


@cache
def _outcome(cell: Cell, asks: tuple[tuple[str, Any], ...]) -> str:
    world = World(0, cell.world_size, 0, cell.world_size, 0, 1, "torchrun")
    sides: dict[str, Any] = {kind: made(kind, getattr(cell, kind)) for kind in ("strategy", "accelerator", "precision")}
    try:
        resolve(**sides, devices=cell.world_size, world=world, **dict(asks))
    except PlanError as error:
        return "refused: " + refusal(error)
    return "ok"


def refusal(error: PlanError) -> str:
    """The conflicts, without versions and remedies."""
    texts = [f"{' and '.join(conflict.parties)}: {conflict.reason}" for conflict in error.conflicts]
    return re.sub(r" \(trivet [^)]*\)", "", " | ".join(texts))


def outcomes() -> dict[str, str]:
    """What negotiation says of each of `all_cells`."""
    return {str(cell): outcome(cell) for cell in all_cells()}


def checks_in(cell: Cell, terms: Terms = UNDECLARED) -> dict[str, Check]:
    """The checks that mean something in a cell, for a plugin with these declarations."""
    if terms.synchronises_every > 1 and cell.world_size > 1:
        return APART
    if cell.plugin("strategy").synchronises_every > 1 and cell.world_size > 1:
        return {}  # ranks are apart by the strategy's design: its own suite tries it with every counterpart
    dtypes, size, offers = cell.dtypes, cell.world_size, cell.plugin("strategy").offers
    return {
        name: check
        for name, check in TOGETHER.items()
        if (size in check.sizes if check.sizes else check.at_four or size < 4) and check.applies(dtypes)
        if not check.only_offered or check.offer in offers
        if check.precision is None or outcome(replace(cell, precision=check.precision)) == "ok"
    }


def items(cells: Iterable[Cell], terms: Terms = UNDECLARED) -> list[Item]:
    """Every check of every cell, as far as negotiation admits what it asks for."""
    return [
        (cell, check.name)
        for cell in cells
        for check in checks_in(cell, terms).values()
        if not check.asks or outcome(cell, check) == "ok"
    ]


def refused(cells: Iterable[Cell], terms: Terms = UNDECLARED) -> Iterator[Item]:
    """The rest: an admitted cell with a check whose run is refused, and with an empty name cells that are."""
    for cell in cells:
        if outcome(cell) != "ok":
            yield cell, ""
            continue
        for check in checks_in(cell, terms).values():
            if check.asks and outcome(cell, check) != "ok":
                yield cell, check.name


def named(check: str) -> Check:
    """A check by its name."""
    return TOGETHER[check] if check in TOGETHER else APART[check]


def cover(everything: Sequence[Item], together: int = 2) -> list[Item]:
    """Few items that hold every pair of values (strategy, precision, accelerator, world size, check) that occurs.

    With ``together=1`` still fewer, that hold every value. Greedy, and the same for the same items: the item with the
    most new pairs comes next; where two have as many, one of two processes, the smallest number that communicates.
    """

    def pairs(item: Item) -> set[tuple[tuple[int, object], ...]]:
        cell, check = item
        return set(combinations(enumerate((*cell.names, cell.world_size, check)), together))

    chosen: list[Item] = []
    missing = set().union(*map(pairs, everything))
    while missing:
        best = max(everything, key=lambda item: (len(pairs(item) & missing), item[0].world_size == 2))
        chosen.append(best)
        missing -= pairs(best)
    return [item for item in everything if item in chosen]
