"""The benchmark of `run.py` runs, as far as a machine without a device allows, and its table says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import benchmark
import pytest
import untested
from benchmark import Row
from full import FULL


def test_it_runs_on_the_cpu() -> None:
    rows = benchmark.measure(benchmark.SMALL, "cpu", 60.0)
    assert {row.name: row.failed for row in rows if row.failed} == {}
    assert len(benchmark.table(rows)) == len(rows) + 2


def test_the_table_compares_and_complains() -> None:
    rows = [
        Row("by hand, fp32", [10.0], 2**20, 0.0), Row("fp32", [11.0, 9.0, 12.0], 2**21, 0.0),
        Row("fp16-mixed", [5.5], 2**20, 1.0), Row("bf16-mixed", [5.0], 2**20, 0.5), Row("bf16-true", failed="Error: x"),
    ]  # fmt: skip
    table = benchmark.table(rows)
    assert table[3] == "| fp32 | 11.00 | 1.100 | 1.00 | 2 | 0 |"
    assert table[4] == "| fp16-mixed | 5.50 |  | 2.00 | 1 | 1 |"
    assert table[6] == "| bf16-true | failed: Error: x | | | | |"
    assert benchmark.broken(rows) == ["bf16-mixed: the host waits 0.5 times an update, 0 are allowed"]


@pytest.mark.skipif(not FULL, reason="traces other tests; with TRIVET_CI_FULL=1 only")
def test_the_list_of_untested_lines_is_current() -> None:
    """Write it anew: python tests/device/untested.py --write"""
    script = Path(__file__).with_name("untested.py")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert untested.written() in ran.stdout
