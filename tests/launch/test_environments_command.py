"""`trivet env`: what it says, in 80 columns and as JSON."""

from __future__ import annotations

import json

import pytest
from test_environments_known import OPEN_MPI, SAGEMAKER, SLURM, TORCHRUN
from trivet.commands import entry


def env(capsys, *words: str, code: int = 0) -> str:
    assert entry.run(["env", *words], prog="trivet")[0] == code
    return capsys.readouterr().out


@pytest.fixture
def variables(monkeypatch):
    def put(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_what_was_found_and_why_in_80_columns(capsys, variables):
    assert "one process: no launcher started it as one of several" in env(capsys)
    variables(SLURM)
    text = env(capsys)
    assert all(len(line) <= 80 for line in text.splitlines())
    joined = " ".join(text.split())
    assert "rank 3 of 4, started by slurm: 1 of 2 on node 1 of 2; they meet at node01:19711" in joined
    assert "slurm this process SLURM_JOB_ID=4711 is set, SLURM_STEP_ID=0 is set, SLURM_PROCID=3 is set" in joined
    assert "openmpi no none of OMPI_COMM_WORLD_RANK" in joined


def test_as_json(capsys, variables):
    variables(SAGEMAKER)
    found = json.loads(env(capsys, "--json"))
    assert found["world"] is None
    assert (found["node"]["rank"], found["node"]["num_nodes"], found["node"]["source"]) == (1, 2, "sagemaker")
    rows = {row["name"]: row for row in found["environments"]}
    assert rows["sagemaker"]["found"] == "node"
    assert rows["torchrun"] == {
        "name": "torchrun", "distribution": "trivet", "version": rows["torchrun"]["version"], "found": "nothing",
        "reasons": ["none of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE is set"],
    }  # fmt: skip
    assert found["profile"]["name"] == "cpu-gloo"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (OPEN_MPI | SAGEMAKER | {"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "there is no OMPI_COMM_WORLD_LOCAL_SIZE"),
        (SLURM | SAGEMAKER, "2 environments say that they started this process: environment 'sagemaker'"),
    ],
)
def test_contradictions_are_shown_with_all_the_reasons(values, message, capsys, variables):
    variables(values)
    text = env(capsys, code=2)
    assert message in " ".join(text.split())
    assert "profile" in text


def test_what_a_profile_would_set(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_NET", "IB")
    text = env(capsys, "--profile", "cuda-ethernet", "--nodes", "2")
    assert "NCCL_NET=Socket  (yours stays: IB)" in text
    assert "NCCL_SOCKET_NTHREADS=4\n" in text
    assert "unproven: never run on hardware of its kind" in " ".join(text.split())
    assert "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-nthreads" in text
    found = json.loads(env(capsys, "--json", "--profile"))["profile"]
    assert (found["name"], found["proven"]) == ("cpu-gloo", "2 processes on one machine, torch 2.13")
    assert entry.run(["env", "--profile", "cude"], prog="trivet")[0] == 2
    assert "no communication profile is named 'cude'" in capsys.readouterr().err


def test_torchrun_inside_of_srun_is_the_one(capsys, variables):
    variables(SLURM | TORCHRUN)
    joined = " ".join(env(capsys).split())
    assert "rank 1 of 2, started by torchrun" in joined
    assert "slurm no TORCHELASTIC_RUN_ID is set: torchrun started this process inside of the job" in joined
