"""``trivet plugins --matrix``: what negotiation says of every strategy, accelerator and precision together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..combination import Combination, Party, Request, party, problems
from ..errors import ConfigurationError, PluginError
from ..registry import Entry, Selected, entries, load, make
from ..requirements import extras
from .text import WIDTH, fill, table

KINDS = ("strategy", "accelerator", "precision")
WORLD_SIZES = (1, 2)

HEAD = """\
# What goes together

Which strategy, accelerator and precision can run together, on one process and on two, as negotiation answers before any
process starts. A number stands for a refusal, whose reason is below the tables.

This page was written by `trivet plugins --matrix --portable --markdown`. `--portable` leaves out what depends on a
machine: only Trivet's own plugins are in the tables; every accelerator is taken to be there, with two devices; and
plugins that need an extra are left out, installed or not. Without it, `trivet plugins --matrix` says what goes together
on the machine where it runs, other people's plugins included.
"""


@dataclass(frozen=True)
class Cell:
    """One combination, and every reason why it was refused."""

    strategy: str
    accelerator: str
    precision: str
    world_size: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """All combinations; ``names`` are the plugins by kind, ``left_out`` says which others there are and why not."""

    names: dict[str, list[str]]
    cells: list[Cell]
    left_out: list[str]
    unavailable: dict[str, str]

    def as_data(self) -> dict[str, object]:
        """For JSON."""
        cells = [{**vars(cell), "admitted": not cell.reasons} for cell in self.cells]
        return {"cells": cells, "left_out": self.left_out}


def matrix(*, portable: bool = False) -> Matrix:
    """Negotiate every combination of what is installed; imports all of it. ``portable``: see `HEAD`."""
    sides: dict[str, list[tuple[str, Party]]] = {kind: [] for kind in KINDS}
    left_out = []
    for kind in KINDS:
        for name, entry in _listed(kind, portable):
            extra = _extra(entry) if portable else ""
            if extra:
                left_out.append(f"{kind} {name!r} needs the extra {entry.distribution}[{extra}].")
                continue
            try:
                sides[kind].append((name, _party(make(kind, entry.qualified), portable)))
            except (PluginError, ConfigurationError) as error:  # its package is missing, or it has to be given options
                left_out.append(str(error))
    cells = []
    for (s, strategy), (a, accelerator), (p, precision) in product(*(sides[kind] for kind in KINDS)):
        for world_size in WORLD_SIZES:
            combination = Combination(None, strategy, accelerator, precision, Request(devices=world_size))
            cells.append(Cell(s, a, p, world_size, tuple(_reasons(combination))))
    names = {kind: [name for name, _ in sides[kind]] for kind in KINDS}
    unavailable = {name: side.reason for name, side in sides["accelerator"] if not side.available}
    return Matrix(names, cells, left_out, unavailable)


def _extra(entry: Entry) -> str:
    """The extra that a plugin needs: one of its own name, or what its class says."""
    said: str = getattr(load(entry.kind, entry.qualified), "extra", "")
    return said or (entry.name if entry.name in extras(entry.distribution) else "")


def _listed(kind: str, portable: bool) -> Iterator[tuple[str, Entry]]:
    """The names to select plugins by, with their entries."""
    listed = [entry for entry in entries(kind) if not portable or entry.distribution == "trivet"]
    count = Counter(entry.name for entry in listed)
    for entry in listed:
        yield (entry.name if count[entry.name] == 1 else entry.qualified), entry


def _party(selected: Selected, portable: bool) -> Party:
    side = party(selected)
    return replace(side, available=True, reason="", device_count=2) if portable else side


def _reasons(combination: Combination) -> Iterator[str]:
    """Every problem, with the sides by kind and name alone."""
    short = {str(side): f"{side.kind} {side.name!r}" for kind in KINDS if (side := getattr(combination, kind))}
    for problem in problems(combination):
        yield f"{' and '.join(short.get(side, side) for side in problem.parties)}: {problem.reason}"


# ------------------------------------------------------------------------------------------------------------ printing


def as_text(found: Matrix) -> str:
    """One table for each accelerator that is there, columns folded to the width; then the reasons by number."""
    notes = _Notes()
    lines: list[str] = []
    for accelerator in found.names["accelerator"]:
        lines += [""] if lines else []
        if accelerator in found.unavailable:
            lines += fill(
                f"accelerator {accelerator}: ", f"not available here: {found.unavailable[accelerator]}.", indent=2
            )
            continue
        lines.append(f"accelerator {accelerator}")
        for precisions in _blocks(found):
            rows = [("strategy", "W", *precisions), *_rows(found, accelerator, precisions, notes)]
            lines += table(rows, indent="  ")
    lines += ["", "W: the number of processes. A number in the table stands for a refusal:"] if notes.texts else []
    for number, text in enumerate(notes.texts, 1):
        lines += fill(f"  {number:>2}  ", text)
    for text in found.left_out:
        lines += ["", *fill("left out: ", text, indent=2)]
    return "\n".join(lines)


def as_markdown(found: Matrix) -> str:
    """A page: one table for each accelerator, the reasons as a numbered list."""
    notes = _Notes()
    lines = [HEAD]
    for accelerator in found.names["accelerator"]:
        header = ("strategy", "processes", *found.names["precision"])
        lines += [f"## On {accelerator}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        rows = _rows(found, accelerator, found.names["precision"], notes, repeat=True)
        lines += [*(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += ["## Refusals", "", *(f"{number}. {text}" for number, text in enumerate(notes.texts, 1))]
    if found.left_out:
        lines += ["", "## Left out", "", *(f"- {text}" for text in found.left_out)]
    return "\n".join(lines)


class _Notes:
    """Reasons in the order of their first appearance."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, reasons: Sequence[str]) -> str:
        self.texts += [text for text in dict.fromkeys(reasons) if text not in self.texts]
        return ",".join(str(self.texts.index(text) + 1) for text in dict.fromkeys(reasons)) or "yes"


def _rows(
    found: Matrix, accelerator: str, precisions: Sequence[str], notes: _Notes, *, repeat: bool = False
) -> Iterator[tuple[str, ...]]:
    """A row for each strategy and number of processes."""
    by_place = {(c.strategy, c.accelerator, c.precision, c.world_size): c.reasons for c in found.cells}
    for strategy, world_size in product(found.names["strategy"], WORLD_SIZES):
        marks = (notes.mark(by_place[strategy, accelerator, precision, world_size]) for precision in precisions)
        yield (strategy if repeat or world_size == WORLD_SIZES[0] else "", str(world_size), *marks)


def _blocks(found: Matrix) -> Iterator[list[str]]:
    """The precisions, as many to a table as fit."""
    used = start = 6 + max(map(len, [*found.names["strategy"], "strategy"]))
    block: list[str] = []
    for name in found.names["precision"]:
        if block and used + len(name) + 2 > WIDTH:
            yield block
            block, used = [], start
        block.append(name)
        used += len(name) + 2
    if block:
        yield block
