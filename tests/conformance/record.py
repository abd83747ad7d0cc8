"""What negotiation says of every cell of Trivet's own plugins, as it is on record.

``python -m conformance.record`` (in ``tests``) prints it; ``--write`` puts it into ``expected.json``, which a test
compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from trivet.testing import cells
from trivet.testing.subject import Cell

EXPECTED = Path(__file__).with_name("expected.json")


def expected() -> dict[str, str]:
    """What is on record, but for cells of plugins that cannot be used here."""
    record = json.loads(EXPECTED.read_text()).items()
    return {cell: text for cell, text in record if not _unusable(cell)}


def _unusable(cell: str) -> bool:
    """Whether a cell, ``strategy-precision-W2``, is of a plugin that cannot be used here."""
    named, _, _ = cell.rpartition("-")
    return any(cell.startswith(f"{name}-") for name in cells.uninstalled("strategy")) or any(
        named.endswith(f"-{name}") for name in cells.uninstalled("precision")
    )


def admitted(found: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in found if expected().get(str(cell)) == "ok"]


if __name__ == "__main__":
    kept = json.loads(EXPECTED.read_text()).items() - expected().items()  # of plugins that cannot be asked here
    text = json.dumps(dict(sorted([*cells.outcomes().items(), *kept])), indent=1) + "\n"
    if sys.argv[1:] == ["--write"]:
        EXPECTED.write_text(text)
    print(text, end="")
