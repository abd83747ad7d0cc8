"""The CPU, and CUDA as far as a machine without a device allows: calls into torch.cuda are recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trivet import registry
from trivet.accelerators.cpu import CPU
from trivet.accelerators.cuda import CUDA
from trivet.errors import ConfigurationError


def test_cpu() -> None:
    cpu = CPU()
    assert cpu.is_available()
    assert cpu.device_count() >= 1
    assert cpu.device(7) == torch.device("cpu")
    assert {"collectives", "shared_devices", "autocast:bfloat16", "autocast:float16", "dtype:float64"} <= cpu.offers
    assert not cpu.moves_batches
    batch = object()
    assert cpu.to_device(batch, cpu.device(0)) is batch


def test_cpu_memory_and_stats() -> None:
    memory = CPU().memory()
    assert memory["peak"] >= memory["allocated"] > 10_000_000
    assert CPU().stats()["load_1min"] >= 0


class Calls:
    """Replaces functions of torch.cuda by ones that write down how they were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.monkeypatch = monkeypatch

    def replace(self, name: str, result: Any = None) -> None:
        def record(*args: Any) -> Any:
            self.seen.append((name, *args))
            return result

        self.monkeypatch.setattr(torch.cuda, name, record)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def devices(monkeypatch: pytest.MonkeyPatch, count: int, *, built: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)


def test_availability_is_asked_without_initialising_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialises() -> bool:
        raise AssertionError("torch.cuda.is_available() initialises the driver")

    monkeypatch.setattr(torch.cuda, "is_available", initialises)
    monkeypatch.setattr(torch.cuda, "init", initialises)
    monkeypatch.setattr(torch.cuda, "get_device_capability", initialises)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", initialises)
    for count in (0, 2):
        devices(monkeypatch, count)
        cuda = CUDA()
        assert (cuda.is_available(), cuda.device_count()) == (count > 0, count)
        assert {"dtype:bfloat16", "autocast:bfloat16", "autocast:float16", "device_ids"} <= cuda.offers
        assert "shared_devices" not in cuda.offers
        assert cuda.unavailable_reason()


def test_nccl_is_what_collectives_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for nccl in (True, False):
        devices(monkeypatch, 1)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda nccl=nccl: nccl)
        assert ("collectives" in CUDA().offers) == nccl


def test_reasons_of_being_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 0, built=False)
    assert f"this PyTorch build ({torch.__version__}) has no CUDA" in CUDA().unavailable_reason()
    devices(monkeypatch, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert CUDA().unavailable_reason() == "no CUDA device is visible with CUDA_VISIBLE_DEVICES=''"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES is not set" in CUDA().unavailable_reason()


def test_local_rank_is_an_ordinal_among_the_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert CUDA().device(1) == torch.device("cuda", 1)
    with pytest.raises(ConfigurationError, match=r"local rank 2 has no CUDA device: 2 visible .*'5,7'"):
        CUDA().device(2)


def test_setup_seed_synchronize_and_teardown(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    for name in ("set_device", "reset_peak_memory_stats", "manual_seed", "synchronize", "empty_cache"):
        calls.replace(name)
    cuda, device = CUDA(), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    cuda.teardown()
    assert calls.seen == []
    cuda.setup(device)
    cuda.seed(3)
    cuda.synchronize()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.teardown()
    assert calls.seen == [
        ("set_device", device),
        ("reset_peak_memory_stats", device),
        ("manual_seed", 3),
        ("synchronize",),
        ("empty_cache",),
    ]


def test_memory(calls: Calls) -> None:
    calls.replace("memory_allocated", 1)
    calls.replace("max_memory_allocated", 2)
    calls.replace("memory_reserved", 3)
    assert CUDA().memory() == {"allocated": 1, "peak": 2, "reserved": 3}


def test_stats_need_the_nvml_package(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    find: Callable[[str], Any] = lambda name: None  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find(name))
    assert CUDA().stats() == {}
    find = lambda name: SimpleNamespace()  # noqa: E731
    for name, value in (("utilization", 40), ("temperature", 61), ("power_draw", 250_000)):
        calls.replace(name, value)
    assert CUDA().stats() == {"utilization_percent": 40.0, "temperature_celsius": 61.0, "power_watts": 250.0}


@pytest.mark.parametrize("pin", [True, False])
def test_transfer_is_pinned_and_does_not_wait(monkeypatch: pytest.MonkeyPatch, pin: bool) -> None:
    moves: list[tuple[torch.device, bool]] = []
    pinned: list[torch.Tensor] = []

    def to(self: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        moves.append((device, non_blocking))
        return self

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self)
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: any(self is tensor for tensor in pinned))
    batch = {"x": torch.ones(2), "y": [torch.ones(1), "text"], "sparse": torch.eye(2).to_sparse()}
    device = torch.device("cuda", 0)
    moved = CUDA(pin_memory=pin).to_device(batch, device)
    assert moved["y"][1] == "text"
    assert moves == [(device, True)] * 3
    assert len(pinned) == (2 if pin else 0)
    CUDA(pin_memory=pin).to_device(batch, device)
    assert len(pinned) == (2 if pin else 0)


def test_both_come_through_their_entry_points() -> None:
    assert type(registry.make("accelerator", "cpu").plugin) is CPU
    selected = registry.make("accelerator", {"name": "gpu", "pin_memory": False})
    assert type(selected.plugin) is CUDA
    assert (selected.name, selected.options) == ("cuda", {"pin_memory": False})
