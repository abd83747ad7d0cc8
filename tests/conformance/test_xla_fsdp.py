"""Sharding by XLA's compiler over four devices of its CPU, in workers of their own: a process has one device or all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trivet.testing import StrategySuite, cells
from trivet.testing.pool import Pools

from .test_xla import MIXED, OTHERS


@pytest.fixture(scope="module")
def trivet_pools() -> Iterator[Pools]:
    pools = Pools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_NUM_DEVICES", "4")
        yield pools
    pools.close()


if "xla" in cells.here("accelerator"):

    class TestXLAFSDP(StrategySuite):
        plugin = {"name": "xla-fsdp", "min_size": 1}  # noqa: RUF012
        accelerators = ("xla",)
        precisions = OTHERS
        world_sizes = (1, 2)
        timeout_s = 180.0

    class TestXLAFSDPMixed(TestXLAFSDP):
        plugin = {"name": "xla-fsdp", "min_size": 1}  # noqa: RUF012
        precisions = ("bf16-mixed",)
        tolerance = MIXED
