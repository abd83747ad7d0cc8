"""The stages of DeepSpeed through the suites, in an environment of its own; `test_own` has the default one, which is 2.

All stages and numbers of processes where TRIVET_CI_FULL=1; else stages 1 and 3 on up to two.
"""

from __future__ import annotations

import pytest
from full import FULL
from trivet.testing import StrategySuite, cells

pytestmark = pytest.mark.deepspeed


def suite(stage: int) -> type[StrategySuite]:
    plugin = {"name": "deepspeed", "stage": stage}
    sizes = cells.WORLD_SIZES if FULL else (1, 2)
    options = {"plugin": plugin, "world_sizes": sizes, "timeout_s": 240.0}  # building an engine takes a second
    return type(f"TestStage{stage}", (StrategySuite,), {**options, "__module__": __name__})


if "deepspeed" in cells.own("strategy"):
    TestStage1, TestStage3 = suite(1), suite(3)
    if FULL:
        TestStage0 = suite(0)
