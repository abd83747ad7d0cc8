"""mps and xpu as far as a machine without them allows: what is negotiated, and recorded calls. The suite of
`tests/conformance/test_own.py` runs them where such a device is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trivet.accelerators.mps import MPS
from trivet.accelerators.xpu import XPU
from trivet.capabilities import resolve
from trivet.errors import ConfigurationError, PlanError
from trivet.layout import addressable
from trivet.packed import Packed
from trivet.slot import wide


def record(monkeypatch: pytest.MonkeyPatch, owner: Any, **results: Any) -> list[tuple[Any, ...]]:
    """Replace functions by ones that write down their calls."""
    seen: list[tuple[Any, ...]] = []

    def recorded(name: str, result: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append((name, *args))
            return result

        return call

    for name, result in results.items():
        monkeypatch.setattr(owner, name, recorded(name, result))
    return seen


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are there, xpu with two devices."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("accelerator", "options", "text"),
    [
        ("mps", {"precision": "fp64"}, "Metal has no float64"),
        ("mps", {"precision": "fp8-mixed"}, "Metal has no float8"),
        ("mps", {"devices": 2, "strategy": "ddp"}, "No backend connects processes on Apple's GPUs"),
        ("xpu", {"precision": "fp64"}, "Many of Intel's GPUs have no float64"),
        ("xpu", {"devices": 2, "strategy": "ddp"}, "has no XCCL"),
    ],
)
def test_what_they_lack_is_refused_with_the_reason(
    there: None, accelerator: str, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: False)
    with pytest.raises(PlanError) as caught:
        resolve(accelerator=accelerator, **options)
    assert text in str(caught.value)


@pytest.mark.parametrize("accelerator", ["mps", "xpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true", "fp16-true"])
def test_what_they_have_is_admitted(there: None, accelerator: str, precision: str) -> None:
    plan = resolve(accelerator=accelerator, precision=precision, devices=1).plan
    assert plan.device_type == accelerator


def test_reasons_of_being_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("sys.platform", "linux")
    assert MPS().unavailable_reason() == "MPS is macOS's, and this is 'linux'"
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    assert "has no MPS" in MPS().unavailable_reason()
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    assert "Metal found no device" in MPS().unavailable_reason()
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    assert "has no XPU" in XPU().unavailable_reason()
    monkeypatch.setattr(torch.version, "xpu", "20250301")
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    assert XPU().unavailable_reason() == "PyTorch has XPU, but no device is visible (ZE_AFFINITY_MASK='')"
    assert (MPS().device_count(), MPS().is_available()) == (0, False)


def test_sums_are_as_wide_as_the_device_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type in ("mps", "xpu"):
            raise (TypeError if device.type == "mps" else RuntimeError)("no float64")
        return torch.zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "ones", ones)
    found = [wide.__wrapped__(torch.device(name)) for name in ("cpu", "mps", "xpu")]
    assert found == [torch.float64, torch.float32, torch.float32]


def test_what_ranks_share_is_as_wide_as_the_device_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.packed.wide", lambda device: torch.float32)
    monkeypatch.setattr(torch.distributed, "all_gather", lambda out, mine: [one.copy_(mine) for one in out])
    packed: Any = Packed("fit", SimpleNamespace(world=SimpleNamespace(world_size=2), device=torch.device("cpu")))
    numbers = torch.tensor([3.0], dtype=torch.float64)  # as those are that Python's numbers are made into
    assert packed._all_gather([0.0] * 4, numbers, [1.0]).dtype == torch.float32
    assert packed.reduce(["mean s00 loss"], numbers, [1.0]) == {"mean s00 loss": 3.0}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_device_in_trouble_is_not_one_without_float64(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def ones(*shape: Any, **options: Any) -> torch.Tensor:
        raise error("in trouble")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.raises(error, match="in trouble"):
        wide.__wrapped__(torch.device("xpu"))


def test_tensors_without_content_are_not_a_lazy_devices() -> None:
    for tensor in (torch.zeros(0), torch.zeros(2, device="meta")):
        assert addressable(tensor) is tensor


def test_devices(there: None) -> None:
    assert (MPS().device(0), XPU().device(1)) == (torch.device("mps", 0), torch.device("xpu", 1))
    with pytest.raises(ConfigurationError, match="local rank 1 has no MPS device"):
        MPS().device(1)
    with pytest.raises(ConfigurationError, match="local rank 2 has no XPU device: 2 visible"):
        XPU().device(2)


def test_mps_calls(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"current_allocated_memory": 1, "driver_allocated_memory": 2}
    seen = record(monkeypatch, torch.mps, manual_seed=None, synchronize=None, empty_cache=None, **found)
    mps = MPS()
    mps.teardown()
    assert seen == [], "never used"
    mps.setup(torch.device("mps", 0))
    mps.seed(3)
    mps.synchronize()
    assert mps.memory() == {"allocated": 1, "reserved": 2}
    mps.teardown()
    mps.teardown()
    assert [seen[0], seen[1], *seen[4:]] == [("manual_seed", 3), ("synchronize",), ("empty_cache",)]


def test_xpu_calls(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"memory_allocated": 1, "max_memory_allocated": 2, "memory_reserved": 3}
    done = {"set_device_index": None, "reset_peak_memory_stats": None, "synchronize": None, "empty_cache": None}
    seen, seeds = (
        record(monkeypatch, torch.accelerator, **found, **done),
        record(monkeypatch, torch.xpu, manual_seed=None),
    )
    xpu = XPU()
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: False)
    xpu.teardown()
    assert seen == []
    xpu.setup(torch.device("xpu", 1))
    xpu.seed(3)
    xpu.synchronize()
    assert xpu.memory() == {"allocated": 1, "peak": 2, "reserved": 3}
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    xpu.teardown()
    assert seen[:3] == [("set_device_index", 1), ("reset_peak_memory_stats",), ("synchronize",)]
    assert (seen[-1], seeds) == (("empty_cache",), [("manual_seed", 3)])
