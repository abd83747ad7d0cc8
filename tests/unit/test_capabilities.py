"""Negotiation: every conflict at once, each with a remedy that itself negotiates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import trivet
from trivet import registry
from trivet.capabilities import Party, Plan, Request, auto_accelerator, negotiate, resolve, resolve_devices
from trivet.errors import ConfigurationError, PlanError
from trivet.launch.world import World
from trivet.plugins import Accelerator, Clip, Needs, Policy, Precision, Strategy
from trivet.registry import Selected

TORCHRUN = World(rank=0, world_size=4, local_rank=0, local_world_size=2, node_rank=0, num_nodes=2, source="torchrun")
ONE_NODE = World(rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, num_nodes=1, source="torchrun")


class Toy(Accelerator):
    """Four devices that know two dtypes."""

    device_type: ClassVar[str] = "toy"
    collective_backend: ClassVar[str | None] = "toycl"
    available = True
    offers = frozenset({"collectives", "dtype:float32", "dtype:bfloat16"})

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return 4

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")


class Unplugged(Toy):
    available = False


class Islands(Toy):
    offers = frozenset({"dtype:float32"})


class Bare(Strategy):
    """Offers nothing but several processes."""

    offers = frozenset({"several_processes"})


class Alone(Strategy):
    needs = Needs()
    offers = frozenset({"loss_scaling", "accumulation", "clipping", "manual_optimization"})

    def mesh_dims(self, world_size: int) -> dict[str, int]:
        return {}


class Pairs(Strategy):
    def mesh_dims(self, world_size: int) -> dict[str, int]:
        if world_size % 2:
            raise ValueError(f"pairs need an even number of processes, not {world_size}")
        return {"dp": world_size // 2, "tp": 2}


class Wrong(Strategy):
    def mesh_dims(self, world_size: int) -> dict[str, int]:
        return {"dp": world_size + 1}


class Lisping(Strategy):
    offers = frozenset({"several_proceses"})


class Misspelt(Precision):
    policy = Policy()
    needs = Needs(accelerator=frozenset({"autocast:bflaot16"}))


def conflicts(**request: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        resolve(**request)
    return caught.value


def follow(remedy: str, request: dict[str, Any]) -> Plan:
    """Resolve again with the flags of a remedy."""
    names = {"accumulate_grad_batches": "accumulate", "gradient_clip_val": "clip"}
    words = remedy.split()
    changed = dict(request)
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = flag.removeprefix("--")
        changed[names.get(name, name)] = None if value == "null" else int(value) if value.isdigit() else value
    return resolve(**changed).plan


def test_by_name_and_by_object_the_plan_is_the_same() -> None:
    from trivet.accelerators.cpu import CPU
    from trivet.precision.mixed import BF16Mixed
    from trivet.strategies.ddp import DDP

    by_name = resolve(accelerator="cpu", strategy="ddp", precision="bf16", devices=2)
    by_object = resolve(accelerator=CPU(), strategy=DDP(), precision=BF16Mixed(), devices=2)
    assert by_name.plan == by_object.plan
    for one, other in zip(by_name[1:4], by_object[1:4], strict=True):
        assert type(one.plugin) is type(other.plugin)
        assert replace(one, plugin=None) == replace(other, plugin=None)
    assert (by_name.plan.param_dtype, by_name.plan.compute_dtype) == ("float32", "bfloat16")
    assert "compute      bfloat16" in str(by_name.plan)


def test_plan_prints_and_goes_through_json() -> None:
    plan = resolve(
        accelerator="cpu", devices=2, precision="fp16", clip=Clip(0.5), accumulate=4, on_skip="samples", manual=True
    ).plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert Plan.from_dict({**plan.to_dict(), "from_the_future": 1}) == plan
    text = str(plan)
    for part in (
        "accelerator  cpu (trivet ",
        "processes    2, started here",
        "device       cpu, collectives by gloo",
        "mesh         dp=2",
        "loss scaling dynamic, initial 65536, growth 2, backoff 0.5, interval 2000",
        "clipping     by norm, 0.5",
        "update       manual optimization, 4 micro-batches per process, None from the step skips the samples",
        "notes        - strategy auto: ddp, for 2 processes",
    ):
        assert part in " ".join(text.split("\n" + " " * 13))
    assert max(map(len, text.splitlines())) <= 80


def test_a_success_imports_no_other_plugin() -> None:
    code = (
        "import sys; from trivet.capabilities import resolve; resolve(accelerator='cpu', strategy='single')\n"
        "assert not {'trivet.accelerators.cuda', 'trivet.precision.mixed', 'trivet.strategies.ddp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_conflict_is_collected_and_every_remedy_runs() -> None:
    request: dict[str, Any] = {
        "accelerator": Unplugged(),
        "strategy": Bare(),
        "precision": "fp16",
        "devices": 3,
        "num_nodes": 2,
        "manual": True,
        "on_skip": "samples",
        "accumulate": 2,
        "clip": Clip(1.0),
    }
    error = conflicts(**request)
    text = str(error)
    for part in (
        "precision 'fp16-mixed' (trivet 0.1.0) and strategy 'Bare' (local): the first wants 'loss_scaling'",
        "precision 'fp16-mixed' (trivet 0.1.0) and accelerator 'Unplugged' (local): the first wants 'autocast:float16'",
        "manual optimization and strategy 'Bare' (local)",
        "--on_skip samples and strategy 'Bare' (local)",
        "--accumulate_grad_batches 2 and strategy 'Bare' (local)",
        "--gradient_clip_val and strategy 'Bare' (local)",
        "accelerator 'Unplugged' (local) and this machine: it is not available: no toy device was found",
        f"--num_nodes 2 and launcher 'local' (trivet {trivet.__version__}): no environment says which node this is, "
        "and node_rank and main_address are not given. Start the same command on every node, with its own --node_rank, "
        "from 0 up, and the --main_address of node 0. Or start the script on every node with "
        "`torchrun --nnodes 2 --nproc-per-node 3 ...`",
    ):
        assert part in text
    assert len(error.conflicts) == 8
    for conflict in error.conflicts:
        assert follow(conflict.remedy, request).num_nodes == 1


@pytest.mark.parametrize(
    ("request_", "remedy"),
    [
        ({"accelerator": "cpu", "strategy": "single", "devices": 2}, "--strategy ddp"),
        ({"accelerator": Unplugged()}, "--accelerator cpu"),
        ({"accelerator": Toy(), "strategy": "ddp", "devices": 9}, "--devices 4"),
        ({"accelerator": Toy(), "strategy": "ddp", "devices": [0, 2]}, "--devices 2"),
        ({"accelerator": Toy(), "strategy": "single", "precision": "fp64", "devices": 1}, "--accelerator cpu"),
        ({"accelerator": Islands(), "strategy": "ddp", "devices": 1}, "--accelerator cpu"),
        ({"accelerator": "cpu", "strategy": Bare(), "precision": "fp16"}, "--strategy ddp"),
        ({"accelerator": "cpu", "strategy": Pairs(), "devices": 3}, "--devices 2"),
        ({"accelerator": "cpu", "strategy": Pairs(), "devices": 1}, "--devices 2"),
        ({"accelerator": "cpu", "strategy": Wrong(), "devices": 2}, "--strategy ddp"),
        ({"accelerator": "cpu", "num_nodes": 2}, "--num_nodes 1"),
        ({"accelerator": "cpu", "devices": 4, "world": ONE_NODE}, "--devices 2"),
        ({"accelerator": "cpu", "strategy": "single", "world": ONE_NODE}, "--strategy ddp"),
        ({"accelerator": "cpu", "num_nodes": 3, "world": TORCHRUN}, "--num_nodes 2"),
    ],
)
def test_one_conflict_has_the_smallest_remedy(request_: dict[str, Any], remedy: str) -> None:
    (conflict,) = conflicts(**request_).conflicts
    assert conflict.remedy == remedy
    follow(remedy, request_)


def test_the_remedy_is_only_sought_after_a_refusal_and_may_not_exist() -> None:
    toy, fp64 = registry.make("accelerator", Toy()), registry.make("precision", "fp64")
    single = registry.make("strategy", "single")

    def must_not_be_called(kind: str) -> Iterator[tuple[str, Selected]]:
        raise AssertionError(kind)

    negotiate(None, single, toy, registry.make("precision", "fp32"), Request(), alternatives=must_not_be_called)
    with pytest.raises(PlanError, match=r"No combination of Trivet's own plugins was found instead.") as caught:
        negotiate(None, single, toy, fp64, Request(), alternatives=lambda kind: ())
    assert caught.value.conflicts[0].remedy == ""


def test_misspelt_capability_is_pointed_out() -> None:
    text = str(conflicts(accelerator="cpu", precision=Misspelt()))
    assert "anything named 'autocast:bflaot16'; did its author mean 'autocast:bfloat16'?" in text


def test_needs_of_the_module_and_of_the_run() -> None:
    module = Party("module", "Net", "acme", "2.0", needs={"strategy": frozenset({"pipeline"})})
    text = str(conflicts(accelerator="cpu", module=module, needs={"precision": frozenset({"fp8"})}))
    assert "module 'Net' (acme 2.0) and strategy 'single' (trivet" in text
    assert "this run and precision 'fp32' (trivet" in text


def test_more_processes_than_cores_is_a_note() -> None:
    from trivet.accelerators.cpu import CPU

    count = CPU().device_count() + 1
    plan = resolve(accelerator="cpu", devices=count).plan
    assert any(note.startswith(f"{count} processes share ") for note in plan.notes)


def test_a_strategy_says_what_users_should_know() -> None:
    class Talkative(Strategy):
        def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
            return (f"{world_size} {deterministic}",)

    notes = resolve(accelerator="cpu", strategy=Talkative(), devices=1, deterministic=True).plan.notes
    assert notes == ("strategy 'Talkative' (local) has one process: it communicates with nobody", "1 True")


def test_auto_says_what_it_chose_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    plan = resolve().plan
    assert (plan.accelerator, plan.strategy, plan.world_size, plan.backend) == ("cpu", "single", 1, None)
    assert plan.notes[0].startswith("accelerator auto: cpu; cuda is not available: ")
    assert plan.notes[0].endswith("; not available either: xla, xpu, mps")
    assert plan.notes[1].startswith("devices auto: 1, since processes share the devices of accelerator 'cpu'")
    assert plan.notes[2] == "strategy auto: single, for one process"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert auto_accelerator() == ("trivet:cuda", "accelerator auto: cuda")
    plan = resolve().plan
    assert (plan.accelerator, plan.strategy, plan.devices, plan.backend) == ("cuda", "ddp", 3, "nccl")
    assert "devices auto: 3, all of accelerator 'cuda' (trivet" in " ".join(plan.notes)


def test_listed_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    plan = resolve(accelerator="cuda", devices="0,2").plan
    assert (plan.devices, plan.device_ids, plan.device_index(1)) == (2, (0, 2), 2)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    (conflict,) = conflicts(accelerator="cuda", devices=[0, 3]).conflicts
    assert "there is no device 3; the visible ones are 0 to 2" in conflict.reason
    assert resolve(accelerator="cuda", devices=1).plan.device_index(0) == 0


def test_the_environment_has_the_say() -> None:
    plan = resolve(accelerator="cpu", world=TORCHRUN).plan
    assert (plan.world_size, plan.devices, plan.num_nodes, plan.launcher) == (4, 2, 2, "torchrun")
    assert {"devices auto: 2, from torchrun", "num_nodes: 2, from torchrun"} <= set(plan.notes)
    (conflict,) = conflicts(accelerator="cpu", devices=4, world=ONE_NODE).conflicts
    assert conflict.parties == ("--devices 4", "the environment (torchrun)")
    assert "it started 2 processes on this node; flags do not overrule that" in conflict.reason
    assert resolve(accelerator="cpu", devices=2, world=World()).plan.launcher == "local"


@pytest.mark.parametrize(
    ("given", "count"), [(2, 2), ("2", 2), (-1, 4), ("-1", 4), ("auto", 4), ([1, 3], 2), ("1,3", 2)]
)
def test_spellings_of_devices(given: Any, count: int) -> None:
    assert resolve_devices(given, Party("accelerator", "toy", device_count=4))[0] == count


@pytest.mark.parametrize("given", [0, -2, "two", "", [], [0, 0], [-1], [True], True, None, 1.5, "1,x"])
def test_devices_that_mean_nothing(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"devices=.*Expected a number of processes"):
        resolve_devices(given, Party("accelerator", "toy", device_count=4))


def test_number_of_nodes_that_means_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"num_nodes=0. Expected 1 or more"):
        resolve(num_nodes=0)


def test_a_misspelt_offer_is_listed_with_the_name_that_was_meant() -> None:
    error = conflicts(accelerator="cpu", strategy=Lisping(), devices=2)
    assert "It offers 'several_proceses'; did its author mean 'several_processes'?" in str(error)
