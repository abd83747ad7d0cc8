"""Sharding by XLA's compiler over four devices of one process. That it trains like the reference, the suites say."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from trivet.testing.pool import Pool
from xla_runs import afterwards, evaluated, sharded

pytest.importorskip("torch_xla")


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_NUM_DEVICES", "4")
        yield found
    found.close()


def test_parameters_gradients_and_state_lie_in_parts_and_nothing_is_read(pool: Pool) -> None:
    """Batches of 5, which four devices do not share evenly."""
    ((lie, reads, stats, said),) = pool.run(sharded, timeout_s=180)
    assert lie["net.0.weight"] == lie["gradient"] == lie["state"] == [(8, 3)] * 4
    assert lie["net.2.weight"] == [(2, 8)] * 4
    assert lie["net.0.bias"] == [(32,)] * 4, "smaller than min_size: whole on each"
    assert len(reads) == 8
    assert stats == {"compiled": 2.0, "recompiled": 0.0}
    assert {later - earlier for earlier, later in pairwise(reads)} == {0}
    assert said == "160 parameters over 4 devices, 34 whole on each"


def test_a_process_that_had_one_device_is_refused_before_anything_is_placed(pool: Pool) -> None:
    (text,) = pool.run(afterwards, timeout_s=180)
    assert "XLA's runtime runs in this process already" in text
    assert "Start" in text


def test_a_validation_of_its_own_is_sharded_too(pool: Pool, tmp_path: Path) -> None:
    ((found, expected, lie),) = pool.run(evaluated, tmp_path / "saved", timeout_s=180)
    assert found == expected
    assert lie["net.0.weight"] == [(8, 3)] * 4
