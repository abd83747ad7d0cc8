"""Communication profiles: what they set, what they leave alone, and where the choice is found again."""

from __future__ import annotations

import os
import re

import pytest
import torch
import trivet
from trivet.errors import ConfigurationError
from trivet.launch import profiles

USED = ("OMP_NUM_THREADS", "TRIVET_CPU_AFFINITY", "NCCL_NET", "NCCL_SOCKET_NTHREADS", "FI_PROVIDER")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in USED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", profiles.profiles())
def test_every_profile_says_what_it_is_for_and_each_value_why_and_where_from(name):
    profile = profiles.find(name)
    assert profile.about
    assert profile.device in ("cpu", "cuda")
    assert len({one.name for one in profile.variables}) == len(profile.variables) <= 4
    for setting in profiles.settings(name, {}, 2, cores=8):
        assert setting.variable.why
        assert setting.variable.source.startswith("https://")
        assert re.fullmatch(r"[\w-]+", setting.value), "a value with something that was not filled in"


@pytest.mark.parametrize(
    ("device", "nodes", "fabrics", "name"),
    [
        ("cpu", 1, [], "cpu-gloo"),
        ("cpu", 4, ["mlx5_0"], "cpu-gloo"),
        ("cuda", 1, ["mlx5_0"], "cuda-single-node"),
        ("cuda", 2, [], "cuda-ethernet"),
        ("cuda", 2, ["mlx5_0"], "cuda-infiniband"),
        ("cuda", 2, ["rdmap16s27"], "cuda-efa"),
        ("xla", 2, [], None),
    ],
)
def test_auto_follows_the_device_and_the_network(device, nodes, fabrics, name):
    assert profiles.choose(device, nodes, fabrics) == name


def test_what_the_user_set_wins():
    mine = {"NCCL_NET": "IB", "OMP_NUM_THREADS": "3"}
    assert profiles.values("cuda-ethernet", mine, 2) == {"NCCL_SOCKET_NTHREADS": "4"}
    found = {one.variable.name: (one.value, one.users) for one in profiles.settings("cuda-ethernet", mine, 2, cores=8)}
    assert found["NCCL_NET"] == ("Socket", "IB")
    assert found["OMP_NUM_THREADS"] == ("4", "3")
    profiles.apply("cuda-ethernet", mine, 2)
    assert mine == {"NCCL_NET": "IB", "OMP_NUM_THREADS": "3", "NCCL_SOCKET_NTHREADS": "4"}


def test_what_torch_read_already_is_not_set_afterwards():
    environ: dict[str, str] = {}
    profiles.apply("cuda-ethernet", environ, 2)
    assert environ == {"NCCL_NET": "Socket", "NCCL_SOCKET_NTHREADS": "4"}


def test_cores_are_shared_evenly():
    assert [profiles.share([0, 1, 2, 3, 6, 7], rank, 2) for rank in (0, 1)] == [[0, 1, 2], [3, 6, 7]]
    assert profiles.share([0], 1, 2) == [0]


def test_the_plan_holds_the_choice_and_says_what_is_unproven():
    plan = trivet.Trainer(accelerator="cpu", devices=2, comm_profile="auto").plan()
    assert plan.comm_profile == "cpu-gloo"
    assert type(plan).from_dict(plan.to_dict()).comm_profile == "cpu-gloo"
    assert "comm profile cpu-gloo" in str(plan)
    assert "comm_profile auto: cpu-gloo" in plan.notes
    _, notes = profiles.resolve("cuda-efa", "cuda", 2, started=True)
    assert notes == [
        "comm_profile cuda-efa is unproven: it was never run on hardware of its kind",
        "comm_profile cuda-efa: OMP_NUM_THREADS can only be set by who starts the processes",
    ]
    assert trivet.Trainer(accelerator="cpu").plan().comm_profile is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda-etherent", r"no communication profile is named 'cuda-etherent'\. Did you mean 'cuda-ethernet'\?"),
        ("cuda-efa", r"'cuda-efa' is for cuda, and this run uses cpu\. Expected one of auto, cpu-gloo, or none"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_before_anything_starts(name, message):
    with pytest.raises(ConfigurationError, match=message):
        trivet.Trainer(accelerator="cpu", comm_profile=name)


def what_is_set(runtime):
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    return [os.environ.get(name) for name in USED[:2]], threads, cores, ones.item()


def test_workers_have_it_before_torch_is_loaded():
    cores = len(os.sched_getaffinity(0))
    share = max(cores // 2, 1)
    runtime = trivet.Runtime(accelerator="cpu", devices=2, strategy="ddp", comm_profile="cpu-gloo")
    assert runtime.launch(what_is_set) == ([str(share), "own"], share, share, 2.0)
    assert "TRIVET_CPU_AFFINITY" not in os.environ
    assert len(os.sched_getaffinity(0)) == cores
