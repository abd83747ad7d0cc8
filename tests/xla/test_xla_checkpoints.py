"""What is written on XLA the CPU reads, sharded over two processes, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trivet.checkpoint import directory
from trivet.testing.pool import Pool
from xla_runs import SAVED_AT, SHARDED, UPDATES, fit

pytest.importorskip("torch_xla")
XLA = {"single": ("single", "xla", 1), "four devices": (SHARDED, "xla", 1)}
CPU = ("fsdp", "cpu", 2)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, Pool]]:
    """A process has one XLA device, or all."""
    found = {"single": Pool(1), "four devices": Pool(1), "cpu": Pool(2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_NUM_DEVICES", "4")
        yield found
    for pool in found.values():
        pool.close()


def far(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("kind", XLA)
def test_a_checkpoint_goes_on_where_another_device_and_layout_wrote_it(
    kind: str, pools: dict[str, Pool], tmp_path: Path
) -> None:
    there, here = tmp_path / "xla", tmp_path / "cpu"
    (on_xla,) = pools[kind].run(fit, *XLA[kind], there, None, timeout_s=180)
    on_cpu = pools["cpu"].run(fit, *CPU, here, None)[0]
    assert far(on_xla[UPDATES], on_cpu[UPDATES]) < 1e-5, "they train alike"
    stored = directory.read(there)
    assert stored.module.keys() == on_xla[SAVED_AT].keys()
    assert all(torch.equal(tensor, on_xla[SAVED_AT][name]) for name, tensor in stored.module.items())
    assert torch.equal(stored.module["head.weight"], stored.module["embedding.weight"])

    from_xla = pools["cpu"].run(fit, *CPU, None, there)[0]
    (from_cpu,) = pools[kind].run(fit, *XLA[kind], None, here, timeout_s=180)
    (again,) = pools[kind].run(fit, *XLA[kind], None, there, timeout_s=180)
    assert sorted(from_xla) == sorted(from_cpu) == list(range(SAVED_AT + 1, UPDATES + 1))
    for update in from_xla:
        assert far(from_xla[update], on_xla[update]) < 1e-5
        assert far(from_cpu[update], on_cpu[update]) < 1e-5
        assert far(again[update], on_xla[update]) == 0.0, "on the same device exactly"
