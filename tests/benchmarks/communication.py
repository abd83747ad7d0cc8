"""Bytes that a rank sends for an update of each way to communicate, counted, beside what a formula says.

    OMP_NUM_THREADS=1 python tests/benchmarks/communication.py --write docs/communication.md

Bytes are exact and the same on each run; a difference to the formula ends the run with an error.
"""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pages
import sharding_runs as runs
import torch
import trivet
from sharding import END, START, Ranks, markdown, prose
from sharding_model import Body

PERIOD = 8
POWERSGD = {"name": "ddp", "communication_hook": "powersgd"}
CASES: dict[str, Any] = {
    "`ddp`": "ddp",
    "`ddp`, `fp16`": {"name": "ddp", "communication_hook": "fp16"},
    "`ddp`, `bf16`": {"name": "ddp", "communication_hook": "bf16"},
    "`ddp`, `powersgd` of rank 1": POWERSGD,
    "`ddp`, `powersgd` of rank 4": {**POWERSGD, "powersgd_rank": 4},
    f"`local-sgd`, period {PERIOD}": {"name": "local-sgd", "period": PERIOD},
    f"`diloco`, period {PERIOD}": {"name": "diloco", "period": PERIOD},
}


class Periods(trivet.Callback):
    """The bytes of the updates after the first period."""

    def __init__(self, payload: runs.Payload) -> None:
        self.payload = payload
        self.bytes: dict[str, int] = {}

    def on_update_end(self, trainer: Any, module: Any) -> None:
        if trainer.progress.update == PERIOD:
            self.payload.bytes.clear()
        if trainer.progress.update == 2 * PERIOD:
            self.bytes = dict(self.payload.bytes)


def sent(strategy: Any, world_size: int) -> dict[str, int]:
    """Task: bytes of the collectives of a whole period, by kind."""
    with runs.Payload() as payload:
        look = Periods(payload)
        runs.train(strategy, world_size, look, steps=2 * PERIOD)
    return look.bytes


def expected(strategy: Any) -> Fraction:
    """Bytes of an update, all of them all-reduced."""
    shapes = [param.shape for param in Body().parameters()]
    whole = Fraction(sum(shape.numel() for shape in shapes) * 4)
    options = strategy if isinstance(strategy, dict) else {}
    if "period" in options:
        return whole / PERIOD
    if options.get("communication_hook") != "powersgd":
        return whole / 2 if options else whole
    rank = options.get("powersgd_rank", 1)
    total = 0
    for shape in shapes:
        matrix = len(shape) == 2 and 2 * rank * sum(shape) < shape.numel()
        total += 4 * rank * sum(shape) + 1 if matrix else 4 * shape.numel() + 4  # with a flag, whether there is one
    return Fraction(total)


def measure(ranks: Ranks) -> list[list[str]]:
    whole = expected("ddp")
    table = [["", "bytes of an update", "of `ddp`'s"]]
    for name, strategy in CASES.items():
        found = ranks(2, sent, strategy)
        each = Fraction(sum(found.values()), PERIOD)
        if set(found) != {"all-reduce"} or each != expected(strategy):
            raise AssertionError(f"{name}: found {found}, {each} an update; formula {expected(strategy)}")
        table.append([name, f"{float(each):,.0f}", f"{float(each / whole):.4f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the markers of this page")
    options = parser.parse_args()
    ranks = Ranks()
    try:
        table = measure(ranks)
    finally:
        ranks.close()
    text = prose(
        f"""Payload of the collectives that a rank takes part in for an update, all of them all-reduces, at 2 ranks and
        on average over {PERIOD} updates. The model has {int(expected("ddp")):,} bytes of float32 parameters in six
        matrices and six vectors; gloo, torch {torch.__version__}. Bytes are exact:
        `tests/benchmarks/communication.py`, which writes this section, ends with an error where one differs from the
        formula."""
    )
    text += "\n\n" + markdown(table)
    print(text)
    if options.write:
        pages.put(options.write, text, START, END)


if __name__ == "__main__":
    sys.exit(main())
