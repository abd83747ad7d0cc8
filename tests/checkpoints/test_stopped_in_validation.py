"""SIGTERM within a validation: all ranks end soon, and the run that goes on is the one that never stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from chosen import chosen
from stopped_runs import BATCHES, stopped
from trivet.testing.checks import same
from trivet.testing.pool import Pools

SIZES = {"single": 1, "ddp": 2, "fsdp": 2}
EVERY = [(strategy, interval) for strategy in SIZES for interval in (1.0, 3)]  # at an epoch's end, within an epoch
FEW = [("single", 1.0), ("ddp", 3), ("fsdp", 1.0)]


@pytest.mark.parametrize(("strategy", "interval"), chosen("signals within a validation", EVERY, FEW))
def test_a_signal_within_a_validation(strategy: str, interval: Any, trivet_pools: Pools, tmp_path: Path) -> None:
    ranks = trivet_pools[SIZES[strategy]].run(stopped, (strategy, interval), tmp_path)
    for whole, first, rest in ranks:
        assert first["ended"][0] == signal.SIGTERM
        assert first["ended"] == ranks[0][1]["ended"]
        assert first["seen"] < BATCHES
        assert len(first["values"]) == 1  # of the first validation; the second has no result
        assert all(first["training"])
        same(first["losses"] + rest["losses"], whole["losses"], "losses")
        same(first["values"] + rest["values"], whole["values"], "validations")
        for what in ("weights", "progress", "best", "metrics"):
            same(rest[what], whole[what], what)
