"""Each environment of Trivet's, by what its launcher sets: which process this is, and which it is not."""

from __future__ import annotations

import re

import pytest
import trivet
from trivet.errors import ConfigurationError, PlanError
from trivet.launch import environments, nodelist
from trivet.launch.environment import Node
from trivet.launch.world import World

SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip
ALLOCATION = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[01-02]", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"
}  # fmt: skip
BATCH = ALLOCATION | {"SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-host-8@1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_PORT": "tcp://10.96.0.1:443"}
PYTORCHJOB = POD | {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
TRAINJOB = POD | {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8", "SM_NUM_CPUS": "96"}
LSF = {
    "LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "batch5 1 h36n18 42 h37n01 42", "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "2",
}  # fmt: skip
RAY = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7"}

WORLDS = {
    "slurm": (SLURM, World(3, 4, 1, 2, 1, 2, "slurm", "node01:19711")),
    "slurm, another step": (SLURM | {"SLURM_STEP_ID": "1"}, World(3, 4, 1, 2, 1, 2, "slurm", "node01:27630")),
    "slurm, address given": (SLURM | MEETING, World(3, 4, 1, 2, 1, 2, "slurm", "10.0.0.1:29500")),
    "slurm, one node": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0", "SLURM_LOCALID": "3"},
        World(3, 4, 3, 4, 0, 1, "slurm", "127.0.0.1:19711"),
    ),
    "slurm, uneven nodes": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"},
        World(3, 4, 0, 1, 1, 2, "slurm", "node01:19711"),
    ),
    "slurm, srun in salloc": (SLURM | {"SLURM_JOB_NAME": "interactive", "SLURM_PTY_PORT": "34889"}, SLURM),
    "slurm, srun in srun --pty bash": (
        SLURM | {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "34889", "SLURM_STEP_ID": "2"},
        World(3, 4, 1, 2, 1, 2, "slurm", "node01:20549"),
    ),
    "slurm, with srun's PMI": (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}, SLURM),
    "slurm, WORLD_SIZE of the batch script": (SLURM | {"WORLD_SIZE": "4"}, SLURM),
    "slurm, torchrun in srun": (SLURM | TORCHRUN, World(1, 2, 1, 2, 0, 1, "torchrun")),
    "slurm, mpirun in the job": (
        BATCH | OPEN_MPI | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"},
        World(1, 2, 1, 2, 0, 1, "openmpi", "127.0.0.1:23609"),
    ),
    "slurm, Intel's mpirun in the job": (
        SLURM | HYDRA | {"PMI_SIZE": "4", "PMI_RANK": "3"},
        World(3, 4, 1, 2, 1, 2, "pmi", "node01:19711"),
    ),
    "openmpi": (OPEN_MPI, World(1, 2, 1, 2, 0, 1, "openmpi", "127.0.0.1:23609")),
    "openmpi, two nodes": (
        OPEN_MPI | MEETING | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        World(3, 4, 1, 2, 1, 2, "openmpi"),
    ),
    "openmpi, ranks dealt in turn": (
        OPEN_MPI | MEETING | {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        World(2, 4, 1, 2, 0, 2, "openmpi"),
    ),
    "pmi": (HYDRA | MEETING, World(1, 2, 1, 2, 0, 1, "pmi")),
    "pytorchjob": (PYTORCHJOB, World(1, 2, 0, 1, 1, 2, "pytorchjob")),
    "pytorchjob, torchrun in the pod": (PYTORCHJOB | TORCHRUN, World(1, 2, 1, 2, 0, 1, "torchrun")),
    "trainjob": (TRAINJOB, World(1, 2, 0, 1, 1, 2, "trainjob", "job-node-0-0.job:29500")),
    "trainjob, torchrun in the pod": (TRAINJOB | TORCHRUN, World(1, 2, 1, 2, 0, 1, "torchrun")),
    "sagemaker, torchrun on the host": (SAGEMAKER | TORCHRUN, World(1, 2, 1, 2, 0, 1, "torchrun")),
    "lsf": (LSF, World(3, 4, 1, 2, 1, 2, "lsf", "h36n18:16234")),
    "lsf, the script's node computes": (
        LSF | {"LSB_MCPU_HOSTS": "h1 42 h2 42", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"},
        World(3, 4, 1, 2, 1, 2, "lsf", "h1:16234"),
    ),
    "lsf, by LSB_HOSTS": (
        LSF | {"LSB_MCPU_HOSTS": "", "LSB_HOSTS": "batch5 h1 h1 h2 h2"},
        World(3, 4, 1, 2, 1, 2, "lsf", "h1:16234"),
    ),
    "ray": (
        RAY | {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"},
        World(1, 2, 1, 2, 0, 1, "ray"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WORLDS)
def test_the_world_that_a_launcher_announces(case):
    variables, expected = WORLDS[case]
    expected = WORLDS["slurm"][1] if expected is SLURM else expected
    assert environments.detect(variables) == expected
    assert environments.node(variables) is None


ONE = {
    "a batch script": (BATCH, "slurm", "this is the batch script, or a shell in the allocation; one process, "),
    "a shell of salloc": (ALLOCATION | {"SLURM_JOB_NAME": "interactive"}, "slurm", "room for 4: start the command "),
    "salloc's interactive step": (SLURM | {"SLURM_STEP_ID": "4294967290"}, "slurm", "that of an interactive session"),
    "srun --pty bash": (
        SLURM | {"SLURM_PTY_PORT": "34889", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"}, "slurm", "srun --pty",
    ),
    "srun --pty, renamed": (SLURM | {"SLURM_PTY_PORT": "34889", "SLURM_JOB_NAME": "mine"}, "slurm", "--pty"),
    "a session by its name": (
        SLURM | {"SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "1"}, "slurm", "a session to type in",
    ),
    "a Ray worker under srun ray start": (SLURM | RAY, "slurm", "Ray started this process"),
    "the entrypoint of a Ray job": (RAY, "ray", "--launcher ray starts others"),
    "a job of LSF without jsrun": ({"LSB_JOBID": "7"}, "lsf", "one process in job 7"),
    "a pod of something else": (POD | {"MASTER_ADDR": "x", "MASTER_PORT": "1"}, "pytorchjob", "not a pod with RANK"),
    "an elastic TrainJob": (TRAINJOB | {"PET_NNODES": "1:4"}, "trainjob", "PET_NNODES=1:4 is a range"),
    "nothing": ({}, "openmpi", "none of OMPI_COMM_WORLD_RANK, "),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE)
def test_what_is_one_process_says_why(case):
    variables, name, reason = ONE[case]
    assert environments.detect(variables) is None
    assert environments.node(variables) is None
    (answer,) = (answer for answer in environments.ask(variables) if answer.entry.name == name)
    assert reason in ", ".join(answer.reasons)


NODES = {
    "pytorchjob": (PYTORCHJOB | {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2"}, Node(1, 2, "job-master-0:23456")),
    "pytorchjob, processes counted": (
        PYTORCHJOB | {"PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"},
        Node(1, 2, "job-master-0:23456", 4),
    ),
    "trainjob": (TRAINJOB | {"PET_NPROC_PER_NODE": "4"}, Node(1, 2, "job-node-0-0.job:29500", 4)),
    "sagemaker": (SAGEMAKER, Node(1, 2, "algo-1:26912", 8)),
    "sagemaker, address given": (SAGEMAKER | MEETING | {"SM_NUM_GPUS": "0"}, Node(1, 2, "10.0.0.1:29500")),
}


@pytest.mark.parametrize("case", NODES)
def test_where_a_launcher_starts_one_process_on_each_machine(case):
    variables, expected = NODES[case]
    assert environments.detect(variables) is None
    found = environments.node(variables)
    assert found is not None
    assert (found.rank, found.num_nodes, found.devices) == (expected.rank, expected.num_nodes, expected.devices)
    assert found.address == expected.address
    assert found.source == case.partition(",")[0]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            "no SLURM_LOCALID, SLURM_NOD",
        ),
        (SLURM | {"SLURM_PROCID": "4"}, "srun's variables disagree: SLURM_PROCID=4"),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"},
            r"srun started 4 tasks, but on the nodes there are \[2, 2, 2\]",
        ),
        (SLURM | {"SLURM_STEP_NODELIST": "node[1-"}, r"'node\[1-' is not a list of nodes"),
        (SLURM | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID is 'x'; expected a number"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "there is no OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "3"}, "2 of 3 processes on this node, so not as many on every node"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "openmpi: the rank is 2, which is not below 2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "4 processes on 2 node.*mpirun -x MASTER_ADDR=host1"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 says that this is one of several processes, but not of how many"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "none of MPI_LOCALRANKID.* says which device is its"),
        (HYDRA, "pmi started 2 processes on 1 node.*nothing says where"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS is 'algo-1'; expected a JSON list"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST=algo-3 is none of"),
        (LSF | {"LSB_MCPU_HOSTS": "h1 42"}, r"2 nodes, but LSB_MCPU_HOSTS and LSB_HOSTS name only \['h1'\]"),
        (LSF | {"LSB_JOBID": ""}, "there is no LSB_JOBID"),
    ],
)
def test_variables_that_contradict_one_another_are_an_error(variables, message):
    with pytest.raises(ConfigurationError, match=message):
        environments.detect(variables)


def test_two_at_once_are_an_error_that_names_both_and_how_to_choose():
    by_hand = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    for both, names in ((SLURM | by_hand, ("slurm", "torchrun")), (SLURM | SAGEMAKER, ("sagemaker", "slurm"))):
        with pytest.raises(ConfigurationError) as caught:
            environments.detect(both)
        assert all(f"environment '{name}' (trivet " in str(caught.value) for name in names)
        assert str(caught.value).endswith(f"or set TRIVET_ENVIRONMENT to the one that did: {' or '.join(names)}.")
    chosen = environments.detect(SLURM | by_hand | {"TRIVET_ENVIRONMENT": "slurm"})
    assert chosen == World(3, 4, 1, 2, 1, 2, "slurm", "127.0.0.1:29500")


@pytest.fixture
def variables(monkeypatch):
    def put(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("values", "flags", "message"),
    [
        (
            TORCHRUN,
            {"devices": 4},
            r"--devices 4 and the environment \(torchrun\): it started 2 processes on this node.*\n?.*--devices 2",
        ),
        (
            SLURM,
            {"num_nodes": 3},
            r"--num_nodes 3 and the environment \(slurm\): it started processes on 2 nodes.*\n?.*--num_nodes 2",
        ),
        (SAGEMAKER, {"num_nodes": 3}, r"\(sagemaker\): it started a process on each of 2 nodes; leave out the fl"),
        (
            SAGEMAKER,
            {"launcher": "ray"},
            r"\(sagemaker\) and launcher 'ray' .*: it started one process on each of 2 nodes, and this launcher would "
            r"not connect those of this node with the others\. Use --launcher local, or let it start `torchrun "
            r"--nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr algo-1 --master-port 26912 \.\.\.`",
        ),
        (SAGEMAKER, {"node_rank": 0}, r"--node_rank 0 and the environment \(sagemaker\): it says that node_rank is 1"),
        (SAGEMAKER, {"main_address": "a"}, r"--main_address a and .*: it says that main_address is algo-1"),
        (TORCHRUN, {"node_rank": 1}, r"--node_rank 1 and the environment \(torchrun\): it says that this is node 0"),
        (TORCHRUN, {"main_address": "a"}, r"--main_address a and the environment \(torchrun\): it has told the proc"),
    ],
)
def test_flags_that_contradict_the_environment_are_refused_when_the_trainer_is_made(values, flags, message, variables):
    variables(values)
    with pytest.raises(PlanError) as caught:
        trivet.Trainer(accelerator="cpu", strategy="ddp", **flags)
    assert re.search(message, " ".join(str(caught.value).split())), str(caught.value)


def test_a_batch_script_without_srun_is_told(variables):
    variables(BATCH)
    notes = trivet.Trainer(accelerator="cpu").plan().notes
    assert "slurm: the job has room for 4 tasks, and this process was not started by srun: it is one process" in notes
    assert "srun" not in str(trivet.Trainer(accelerator="cpu", devices=2).plan().notes)


def test_a_plan_takes_what_the_environment_says(variables):
    variables(SLURM)
    plan = trivet.Trainer(accelerator="cpu").plan()
    assert (plan.world_size, plan.devices, plan.num_nodes, plan.launcher) == (4, 2, 2, "slurm")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("node[01-03,07],gpu-a[1,3]-b", ["node01", "node02", "node03", "node07", "gpu-a1-b", "gpu-a3-b"]),
        ("r[1-2]n[8-10]", ["r1n8", "r1n9", "r1n10", "r2n8", "r2n9", "r2n10"]),
        ("n[009-011].example.org,login", ["n009.example.org", "n010.example.org", "n011.example.org", "login"]),
    ],
)
def test_lists_of_nodes(text, expected):
    assert nodelist.hosts(text) == expected


@pytest.mark.parametrize("text", ["", ",", "a,", "a[", "a]", "a[1-]", "a[3-1]", "a[]", "a[x]", "a[1[2]]"])
def test_what_is_no_list_of_nodes(text):
    with pytest.raises(ConfigurationError, match="not a list of nodes"):
        nodelist.hosts(text)


def test_lists_of_tasks():
    assert nodelist.counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigurationError, match="'2x3' is not a list of tasks per node"):
        nodelist.counts("2x3")
