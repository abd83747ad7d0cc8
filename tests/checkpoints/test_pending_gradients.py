"""Gradients that no step has taken yet, under manual optimization, are in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chosen import chosen
from pending_runs import elsewhere, resumed
from trivet.checkpoint.contents import open_checkpoint
from trivet.testing.checks import same
from trivet.testing.pool import Pools

EVERY: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 1, {}), ("single", 1, {"accumulate_grad_batches": 2}), ("ddp", 2, {}), ("fsdp", 2, {}), ("zero1", 2, {}),
]  # fmt: skip
CASES = chosen("gradients between two steps", EVERY, EVERY[:-1])  # without zero1, which does as ddp


@pytest.mark.parametrize(("strategy", "world_size", "options"), CASES)
def test_a_run_goes_on_between_two_steps(
    strategy: str, world_size: int, options: dict[str, Any], trivet_pools: Pools, tmp_path: Path
) -> None:
    ranks = trivet_pools[world_size].run(resumed, strategy, tmp_path, options)
    for whole, others in ranks:
        for batch, (rest, said) in others.items():
            same(rest, [row for row in whole if row[0] > batch], f"from batch {batch} on")
            assert not said
    if not options:
        index = {name for name in open_checkpoint(tmp_path / "at-1").index if "gradient" in name}
        owners = {"all"} if world_size == 1 or strategy == "fsdp" else {"rank0", "rank1"}
        assert index == {f"strategy/{one}/gradient/{name}.weight" for one in owners for name in ("mine", "often")}
        after = {name for name in open_checkpoint(tmp_path / "at-3").index if "gradient" in name}
        assert not any("mine" in name for name in after)  # its step has taken them
    if strategy in ("single", "fsdp") and not options:
        whole = ranks[0][0]
        for other, size in (("single", 1), ("fsdp", 2)):
            found, said = trivet_pools[size].run(elsewhere, other, tmp_path, 2)[0]
            assert not said
            if world_size == size:  # else the batches of an update are others in this test
                assert found[0] == pytest.approx(next(row for row in whole if row[0] == 3), abs=1e-6)
    if strategy == "ddp":
        found, said = trivet_pools[2].run(elsewhere, "fsdp", tmp_path, 2)[0]
        assert len(said) == 1
        assert "['mine.weight', 'often.weight']. They are left out" in said[0]
