"""The CPU, and CUDA as far as a machine without a device allows: calls into torch.cuda are recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trivet import registry
from trivet.accelerators.cpu import CPU
from trivet.accelerators.cuda import CUDA, HANDLING
from trivet.errors import ConfigurationError
from trivet.launch.world import World


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
    for name in ("set_device", "reset_peak_memory_stats", "manual_seed", "synchronize", "empty_cache", "Stream"):
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
        ("Stream", device),
        ("manual_seed", 3),
        ("synchronize",),
        ("empty_cache",),
    ]


def test_memory(calls: Calls) -> None:
    calls.replace("memory_allocated", 1)
    calls.replace("max_memory_allocated", 2)
    calls.replace("memory_reserved", 3)
    calls.replace("max_memory_reserved", 4)
    calls.replace("memory_stats", {"num_alloc_retries": 5})
    assert CUDA().memory() == {"allocated": 1, "peak": 2, "reserved": 3, "peak_reserved": 4, "retries": 5}


def test_stats_need_the_nvml_package(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    find: Callable[[str], Any] = lambda name: None  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find(name))
    assert CUDA().stats() == {}
    find = lambda name: SimpleNamespace()  # noqa: E731
    for name, value in (
        ("utilization", 40), ("temperature", 61), ("power_draw", 250_000), ("memory_usage", 7), ("clock_rate", 1500),
    ):  # fmt: skip
        calls.replace(name, value)
    assert CUDA().stats() == {
        "utilization_percent": 40.0, "memory_utilization_percent": 7.0, "temperature_celsius": 61.0,
        "power_watts": 250.0, "clock_megahertz": 1500.0,
    }  # fmt: skip


class Stream:
    """A stream that writes down who waits for whom."""

    def __init__(self, seen: list[tuple[Any, ...]], name: str) -> None:
        self.seen, self.name, self.events = seen, name, 0

    def record_event(self) -> str:
        self.events += 1
        self.seen.append((self.name, "event", self.events))
        return f"{self.name} {self.events}"

    def wait_event(self, event: str) -> None:
        self.seen.append((self.name, "waits for", event))

    def __enter__(self) -> None:
        self.seen.append(("enter", self.name))

    def __exit__(self, *error: object) -> None:
        self.seen.append(("leave", self.name))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Each transfer, and what streams do, as they are called; tensors move nowhere."""
    seen: list[tuple[Any, ...]] = []
    pinned: list[torch.Tensor] = []

    def to(self: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        seen.append(("to", device, non_blocking))
        return self.view_as(self) if self.layout == torch.strided else self

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        seen.append(("pin",))
        pinned.append(self)
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: any(self is tensor for tensor in pinned))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: seen.append(("read on", stream.name)))
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    computes = Stream(seen, "compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(seen, "copy"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computes)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return seen


BATCH = {"x": torch.ones(2), "y": [torch.ones(1), "text"], "sparse": torch.eye(2).to_sparse()}
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("pin", [True, False])
def test_transfer_is_pinned_and_does_not_wait(transfers: list[tuple[Any, ...]], pin: bool) -> None:
    cuda = CUDA(pin_memory=pin, copy_stream=False)
    cuda.setup(DEVICE)
    assert cuda.to_device(BATCH, DEVICE)["y"][1] == "text"
    assert [entry for entry in transfers if entry[0] == "to"] == [("to", DEVICE, True)] * 3
    assert transfers.count(("pin",)) == (2 if pin else 0)
    cuda.to_device(BATCH, DEVICE)
    assert transfers.count(("pin",)) == (2 if pin else 0)
    assert not [entry for entry in transfers if entry[0] not in ("to", "pin")]


def test_transfer_has_a_stream_of_its_own_for_which_computing_waits(transfers: list[tuple[Any, ...]]) -> None:
    cuda = CUDA()
    cuda.setup(DEVICE)
    cuda.to_device(BATCH, DEVICE)
    moved = [("enter", "copy"), ("pin",), ("to", DEVICE, True), ("leave", "copy")]
    # a sparse tensor's memory cannot be said to be read by another stream, so it is moved on the one that reads it
    begun = [*moved, *moved, ("to", DEVICE, True), ("copy", "event", 1)]
    read = [("read on", "compute")] * 2
    assert transfers == [*begun, ("compute", "waits for", "copy 1"), *read]
    transfers.clear()
    assert cuda.ahead is not None
    given = cuda.ahead(BATCH, DEVICE)
    cuda.ahead(BATCH["x"], DEVICE)
    moved.remove(("pin",))  # they are by now
    begun = [*moved, *moved, ("to", DEVICE, True), ("copy", "event", 2)]
    assert transfers == [*begun, *moved, ("copy", "event", 3)], "nobody waits yet"
    transfers.clear()
    assert given()["y"][1] == "text"
    assert transfers == [("compute", "waits for", "copy 2"), *read], "for this batch alone"
    cuda.teardown()
    assert cuda.ahead is None
    transfers.clear()
    cuda.to_device(BATCH["x"], DEVICE)
    assert transfers == [("to", DEVICE, True)]

    class Own(CUDA):
        def to_device(self, batch: Any, device: torch.device) -> Any:
            return {"own": super().to_device(batch, device)}

    for other in (Own(), CUDA(prefetch=False), CUDA(copy_stream=False)):
        other.setup(DEVICE)
        assert other.ahead is None, "what a subclass does besides would be lost"


def test_what_setup_changes_is_put_back(transfers: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.backends.cudnn.benchmark
    for value in (None, "2"):
        if value is None:
            monkeypatch.delenv(HANDLING, raising=False)
        else:
            monkeypatch.setenv(HANDLING, value)
        cuda = CUDA(cudnn_benchmark=not before, nccl_errors="abort")
        cuda.setup(DEVICE)
        assert (torch.backends.cudnn.benchmark, os.environ[HANDLING]) == (not before, "1")
        cuda.teardown()
        assert (torch.backends.cudnn.benchmark, os.environ.get(HANDLING)) == (before, value)
    with pytest.raises(ConfigurationError, match="nccl_errors='all' is unknown; allowed are none, abort, clean_up"):
        CUDA(nccl_errors="all")


def test_the_process_group_gets_device_and_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from trivet.launch.group import Group

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: asked.append(options))
    group = Group(World(0, 2, 0, 2, 0, 1, "torchrun"), None, torch.device("cuda", 1))
    group.connect("nccl", torch.distributed.HashStore(), 30.0)
    assert (asked[0]["timeout"], asked[0]["device_id"]) == (timedelta(seconds=30), torch.device("cuda", 1))


def test_steps_that_replay_cuda_graphs_give_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of one step must not change when the next one writes into the same memory."""
    from trivet.engine import StepModule
    from trivet.precision.full import FP32

    begun: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    memory, step = torch.zeros(()), StepModule(torch.nn.Linear(1, 1), FP32(), None)
    step.plain, step.graphed = False, True
    step.compiled = {"training_step": lambda number: {"loss": memory.fill_(number)}}
    first, second = step("training_step", 1.0), step("training_step", 2.0)
    assert (float(first["loss"]), float(second["loss"]), len(begun)) == (1.0, 2.0, 2)


def test_both_come_through_their_entry_points() -> None:
    assert type(registry.make("accelerator", "cpu").plugin) is CPU
    selected = registry.make("accelerator", {"name": "gpu", "pin_memory": False})
    assert type(selected.plugin) is CUDA
    others = {"copy_stream": True, "prefetch": True, "cudnn_benchmark": None, "nccl_errors": None}
    assert (selected.name, selected.options) == ("cuda", {"pin_memory": False} | others)
