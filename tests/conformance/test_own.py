"""Our own plugins through the suites that everybody uses. Each cell of the matrix belongs to one of them.

The cells of ``single`` are the CPU's, those of ``ddp`` the precisions', and all others the strategies', so that every
kind of suite trains.
"""

from __future__ import annotations

from collections import Counter

from trivet.testing import AcceleratorSuite, PrecisionSuite, StrategySuite, cells
from trivet.testing.suites import Suite

ELSEWHERE = {"single", "ddp"}
APART = {"xla"}  # accelerators with a file of their own


def suites() -> dict[str, type[Suite]]:
    """One for each of our plugins that can be made here."""
    found: dict[str, type[Suite]] = {}
    for name in cells.own("strategy"):
        precisions = () if name in ELSEWHERE else None
        options = {"plugin": name, "precisions": precisions, "timeout_s": 120.0}  # four ranks may share one core
        found[f"Test_{name}"] = type(f"Test_{name}", (StrategySuite,), options)
    for name in cells.own("precision"):
        found[f"Test_{name}"] = type(f"Test_{name}", (PrecisionSuite,), {"plugin": name, "strategies": ("ddp",)})
    for name in cells.own("accelerator"):
        if name not in APART:
            options = {"plugin": name, "strategies": ("single",)}
            found[f"Test_{name}"] = type(f"Test_{name}", (AcceleratorSuite,), options)
    for suite in found.values():
        suite.__module__ = __name__
    return found


globals().update(suites())


def test_each_cell_of_the_cpu_belongs_to_one_suite() -> None:
    found = Counter(cell for suite in suites().values() for cell in suite.cells() if cell.accelerator == "cpu")
    assert found == Counter(cells.all_cells())
