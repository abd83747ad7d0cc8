"""The table of cells at the end of a test session, from what its tests said. Imports the standard library alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

Row = tuple[str, str, str]  # names of strategy, precision, accelerator
Place = tuple[str, str, str, int]  # and the number of processes


@dataclass
class Report:
    """What was asked for and what came of it; plain data only, so that other processes can add to it.

    ``asked`` and ``ran``: checks by place. ``refused``: places, and single checks of places, that negotiation refuses;
    ``alone``: checks of a plugin by itself, by its label.
    """

    asked: dict[Place, list[str]] = field(default_factory=dict)
    ran: dict[Place, dict[str, bool]] = field(default_factory=dict)
    refused: dict[Place, dict[str, bool]] = field(default_factory=dict)
    alone: dict[str, dict[str, bool]] = field(default_factory=dict)
    notes: dict[Place, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def ask(self, place: Place, check: str, note: str) -> None:
        """A check belongs to this session, whether it is run or left out."""
        self.asked.setdefault(place, []).append(check)
        if note:
            self.notes[place] = note

    def tell(self, test: str, label: str, check: str, place: Place | None, passed: bool) -> None:
        """What a test said."""
        if place is None:
            self.alone.setdefault(label, {})[check] = passed
        else:
            where = self.refused if test == "refused" else self.ran
            where.setdefault(place, {})[check] = passed

    @property
    def counts(self) -> tuple[int, int]:
        """Checks of cells that ran, and those that were left out."""
        ran = sum(map(len, self.ran.values()))
        return ran, max(0, sum(map(len, self.asked.values())) - ran)

    def summary(self) -> str:
        """The line below the table."""
        ran, left_out = self.counts
        if self.refused and not ran and not left_out:
            return (
                "0 checks in cells ran: negotiation refuses every cell, so nothing was trained. The reasons are above."
            )
        hint = " (--trivet-cells all runs all)" if left_out else ""
        return f"{ran} checks in cells ran, {left_out} were left out{hint}."

    def cell(self, place: Place) -> str:
        """What the table says of a place."""
        ran, refused = self.ran.get(place, {}), self.refused.get(place, {})
        failed = [check or "refusal" for check, passed in (*ran.items(), *refused.items()) if not passed]
        if failed:
            return "FAILED: " + ", ".join(sorted(set(failed)))
        if "" in refused:
            return "refused"
        if not ran:
            return "left out"
        checks = len(set(self.asked.get(place, ())) | set(ran))
        left_out = checks - len(ran)
        text = f"{len(ran)} ok, {left_out} left out" if left_out else f"{checks} of {checks} ok"
        if refused:
            text += f", {len(refused)} refused"
        return f"{text} ({self.notes[place]})" if place in self.notes else text

    def table(self) -> list[str]:
        """A Markdown table: a row per combination, a column per number of processes, then the checks without a cell."""
        places: Iterable[Place] = dict.fromkeys((*self.asked, *self.refused, *self.ran))
        sizes = sorted({place[3] for place in places})
        lines: list[str] = []
        if sizes:
            lines.append("| strategy | precision | accelerator | " + " | ".join(f"W = {w}" for w in sizes) + " |")
            lines.append("|---|---|---|" + "---|" * len(sizes))
        rows: dict[Row, set[int]] = {}
        for place in places:
            rows.setdefault(place[:3], set()).add(place[3])
        for row in sorted(rows):
            said = [self.cell((*row, w)) if w in rows[row] else "" for w in sizes]
            lines.append(f"| {' | '.join(row)} | {' | '.join(said)} |")
        alone = []
        for label, checks in self.alone.items():
            failed = [check for check, passed in checks.items() if not passed]
            said_ok = f"{len(checks) - len(failed)} of {len(checks)} ok"
            alone.append(f"- {label}, by itself: {said_ok}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
        notes = [f"- {reason}" for reason in dict.fromkeys(self.reasons)]
        return [*lines, *([""] if lines and (alone or notes) else []), *alone, *notes]


def write_between_marks(page: Path, lines: Iterable[str], name: str = "measured") -> None:
    """Replace what stands between the marks of that name in a page. Raises ValueError where it has none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{str(page)!r} has no lines {begin!r} and {end!r} to write between")
    page.write_text(f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}", encoding="utf-8")
