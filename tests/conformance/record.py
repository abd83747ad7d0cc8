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
    missing = [name for kind in ("strategy", "precision") for name in cells.uninstalled(kind)]
    record = json.loads(EXPECTED.read_text()).items()
    return {cell: text for cell, text in record if not any(cell.startswith(f"{name}-") for name in missing)}


def admitted(found: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in found if expected().get(str(cell)) == "ok"]


if __name__ == "__main__":
    kept = json.loads(EXPECTED.read_text()).items() - expected().items()  # of plugins that cannot be asked here
    text = json.dumps(dict(sorted([*cells.outcomes().items(), *kept])), indent=1) + "\n"
    if sys.argv[1:] == ["--write"]:
        EXPECTED.write_text(text)
    print(text, end="")
