"""``trivet plan --explain``: who wants what in a combination, and who offers it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..combination import KINDS, Combination, Party, demands
from .text import table

HEADER = ("capability", "wanted by", "offered by")


@dataclass(frozen=True)
class Row:
    """One capability that one side wants of another."""

    capability: str
    wanted_by: str
    asked: str
    offered: bool


def rows(combination: Combination) -> list[Row]:
    """Every capability that is wanted, in the order in which negotiation looks at them."""
    return [
        Row(name, _short(demand.wanting), _short(demand.offering), name not in demand.missing)
        for demand in demands(combination)
        for name in sorted(demand.names)
    ]


def as_data(combination: Combination) -> list[dict[str, object]]:
    """The same for JSON."""
    return [asdict(row) for row in rows(combination)]


def explain(combination: Combination) -> str:
    """The table of what is wanted, and below it what is offered and was not wanted here."""
    found = rows(combination)
    cells = [
        (row.capability, row.wanted_by, row.asked if row.offered else f"MISSING: not offered by {row.asked}")
        for row in found
    ]
    wanted = {(row.asked, row.capability) for row in found}
    spare = []
    for kind in KINDS:
        side: Party | None = getattr(combination, kind)
        if side is not None and (names := [n for n in sorted(side.offers) if (_short(side), n) not in wanted]):
            spare.append((_short(side), ", ".join(names)))
    lines = table([HEADER, *cells]) if cells else ["nothing is wanted of anybody"]
    if spare:
        lines += ["", "offered, and not wanted here", *table(spare, indent="  ")]
    return "\n".join(lines)


def _short(side: Party | str) -> str:
    return side if isinstance(side, str) else f"{side.kind} {side.name}"
