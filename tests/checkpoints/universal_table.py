"""The table of `test_universal`: printed at the end of a session, and kept in docs/checkpoints.md."""

from __future__ import annotations

import os
import subprocess
from datetime import date
from pathlib import Path

from trivet.testing.report import write_between_marks
from universal_runs import PAIRS, PLACES, STRATEGIES, Pair, Place

TABLE: dict[Pair, float | None] = {}  # the largest difference after the last update; None where the test failed


def said(writer: Place, strategy: str) -> str:
    """A cell: how far each number of processes got from the unbroken run."""
    texts = []
    for reader in (place for place in PLACES if place.strategy == strategy):
        if (writer, reader) not in TABLE:
            texts.append("–")
            continue
        distance = TABLE[writer, reader]
        texts.append("FAILED" if distance is None else "0" if distance == 0 else f"{distance:.0e}")
    return " / ".join(texts)


def lines() -> list[str]:
    """A row for each place that wrote, a column for each strategy that read, on 1 / 2 / 4 processes."""
    rows = [f"| {writer} | {' | '.join(said(writer, s) for s in STRATEGIES)} |" for writer in PLACES]
    return [f"| written by | {' | '.join(STRATEGIES)} |", "|---|" + "---|" * len(STRATEGIES), *rows]


def summary(passed: bool) -> list[str]:
    """What the end of a session says; writes the page where that was asked for and all pairs passed."""
    left_out = len(PAIRS) - len(TABLE)
    text = f"Checkpoints: {len(TABLE)} pairs of writer and reader, {left_out} left out"
    page = os.environ.get("TRIVET_CHECKPOINT_TABLE")
    if page and passed and not left_out and None not in TABLE.values():
        intro = f"Commit {_commit()}, {date.today().isoformat()}: {len(TABLE)} pairs."
        write_between_marks(Path(page), [intro, "", *lines()], "pairs")
    return [*lines(), text + ("; TRIVET_CI_FULL=1 runs all." if left_out else ".")]


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    ran = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "unknown"
