"""`trivet submit`: what it prints for a command, that this runs, and what it hands to a cluster's programs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import types
from typing import Any

import pytest
import yaml
from clusters import COMMAND, TRAIN, free_port, trains_as_one_process
from clusters import stub as stub
from trivet.commands import entry
from trivet.errors import ConfigurationError
from trivet.launch.submitter import seconds


def submit(*words: str, prog: str = "trivet") -> int:
    return entry.run(["submit", *words], prog=prog)[0]


def printed(capsys, *words: str, prog: str = "trivet") -> str:
    assert submit("--dry-run", *words, prog=prog) == 0
    return capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------------- SLURM


def test_the_script_for_slurm(capsys):
    text = printed(
        capsys, "--to", "slurm", "--nodes", "2", "--devices", "4", "--cpus", "8", "--memory", "64G", "--time", "1-12",
        "--queue", "gpu", "--account", "a b", "--signal", "120", "--setup", "module load cuda", "--sbatch=--exclusive",
        "--env", "GREETING=it's $HOME", "--image", "torch:2", "--",
        "fit", "--accelerator", "cuda", "--model.name", "two words; $x", "--comm_profile", "cuda-ethernet",
    )  # fmt: skip
    assert text.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=trivet-fit",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --mem=64G",
        "#SBATCH --time=1-12",
        "#SBATCH --partition=gpu",
        '#SBATCH --account="a b"',
        "#SBATCH --signal=USR1@120",
        "#SBATCH --exclusive",
        "set -euo pipefail",
        "",
        "module load cuda",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"',
        'export NCCL_NET="${NCCL_NET:-Socket}"',
        'export NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-4}"',
        "export GREETING='it'\"'\"'s $HOME'",
        "srun --cpus-per-task=8 --container-image=torch:2 trivet fit --accelerator cuda --model.name 'two words; $x' "
        "--comm_profile cuda-ethernet",
    ]


def test_a_script_of_the_user_is_what_runs(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jobs/train.py"])
    assert "srun python jobs/train.py fit --devices 2\n" in printed(
        capsys, "--to", "slurm", "fit", "--devices", "2", prog="python train.py"
    )
    manifest = yaml.safe_load(printed(capsys, "--to", "kubeflow", "fit", prog="python train.py"))
    assert manifest["spec"]["trainer"]["args"] == ["jobs/train.py", "fit"]


SRUN = """
while [[ "$1" == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2
export SLURM_STEP_NODELIST='localhost,localhost' SLURM_STEP_TASKS_PER_NODE='1(x2)'
ids=()
for task in 0 1; do
    SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & ids+=($!)
done
code=0
for id in "${ids[@]}"; do wait "$id" || code=$?; done
exit "$code"
"""


def test_the_script_trains_is_signalled_requeued_and_goes_on(tmp_path, capsys, monkeypatch, stub):
    """Under a stub of srun that starts two real processes, on two nodes by its variables."""
    (tmp_path / "train.py").write_text(TRAIN)
    stub("srun", SRUN)
    stub("scontrol", f'echo "$@" >> {shlex.quote(str(tmp_path / "requeued"))}')
    monkeypatch.setattr(sys, "argv", ["train.py"])
    script = printed(
        capsys, "--to", "slurm", "--requeue", "--nodes", "2", *COMMAND, "--strategy", "ddp", prog="python train.py"
    )
    job = free_port() - 15_000
    environ = {
        **os.environ, "SLURM_JOB_ID": str(job), "SLURM_JOB_NAME": "trivet-fit",
        "SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_NTASKS": "2",
        "OUT": str(tmp_path / "trained.pt"), "MARK": str(tmp_path / "mark"),
    }  # fmt: skip
    first = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert first.returncode == 138, first.stderr
    assert (tmp_path / "requeued").read_text() == f"requeue {job}\n"
    second = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "has ended" not in second.stderr
    assert "update=" in second.stderr  # the checkpoint that it went on from
    assert (tmp_path / "requeued").read_text().count("requeue") == 1
    trains_as_one_process(tmp_path / "trained.pt")


# ----------------------------------------------------------------------------------------------------------- Kubernetes


def test_the_trainjob_is_valid_and_holds_everything(capsys):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    found = yaml.safe_load(
        printed(
            capsys, "--to", "kubeflow", "--nodes", "2", "--name", "digits", "--namespace", "team", "--queue", "night",
            "--image", "registry/torch:2", "--runtime", "torch-cuda", "--time", "90", "--memory", "8Gi", "--cpus", "2",
            "--env", "A=1", "fit", "--devices", "4", "--accelerator", "gpu", "--model.name", "it's: [x]",
        )
    )  # fmt: skip
    assert models.TrainerV1alpha1TrainJob.from_dict(found).to_dict() == found
    size = {"cpu": "8", "memory": "8Gi", "nvidia.com/gpu": "4"}
    words = ["-m", "trivet", "fit", "--devices", "4", "--accelerator", "gpu", "--model.name", "it's: [x]"]
    assert found == {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "digits", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "night"}},
        "spec": {
            "runtimeRef": {"name": "torch-cuda"},
            "trainer": {
                "numNodes": 2,
                "numProcPerNode": 4,
                "image": "registry/torch:2",
                "command": ["torchrun"],
                "args": words,
                "env": [{"name": "A", "value": "1"}],
                "resourcesPerNode": {"requests": size, "limits": size},
            },
            "activeDeadlineSeconds": 5400,
        },
    }


def test_the_pods_of_a_trainjob_train_alike(tmp_path, capsys, monkeypatch):
    """Two pods' worth of torchrun, with the variables that the operator sets from the manifest."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    spec = yaml.safe_load(printed(capsys, "--to", "kubeflow", "--nodes", "2", *COMMAND, prog="python train.py"))["spec"]
    trainer = spec["trainer"]
    assert trainer["command"] == ["torchrun"]
    monkeypatch.setenv("OUT", str(tmp_path / "trained.pt"))
    port = str(free_port())
    pods = []
    for node in range(trainer["numNodes"]):
        environ = {
            **os.environ, "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        }  # fmt: skip
        words = [sys.executable, "-m", "torch.distributed.run", *trainer["args"]]
        pods.append(subprocess.Popen(words, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True))
    errors = [pod.communicate(timeout=120)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], errors
    trains_as_one_process(tmp_path / "trained.pt")


def test_the_pytorchjob(capsys):
    found = yaml.safe_load(
        printed(
            capsys, "--to", "pytorchjob", "--nodes", "3", "--devices", "2", "--image", "x:1", "--time", "1:00:00",
            "--env", "A=1", "--gpus", "2", "predict", "--output", "here",
        )
    )  # fmt: skip
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = found["spec"]
    assert (spec["nprocPerNode"], spec["runPolicy"]["activeDeadlineSeconds"]) == ("2", 3600)
    replicas = spec["pytorchReplicaSpecs"]
    assert {kind: one["replicas"] for kind, one in replicas.items()} == {"Master": 1, "Worker": 2}
    for one in replicas.values():
        assert one["template"]["spec"]["containers"] == [
            {
                "name": "pytorch",
                "image": "x:1",
                "command": ["torchrun"],
                "args": ["-m", "trivet", "predict", "--output", "here"],
                "env": [{"name": "A", "value": "1"}],
                "resources": {"requests": {"nvidia.com/gpu": "2"}, "limits": {"nvidia.com/gpu": "2"}},
            }
        ]
    one_node = yaml.safe_load(printed(capsys, "--to", "pytorchjob", "--image", "x:1", "fit"))
    assert list(one_node["spec"]["pytorchReplicaSpecs"]) == ["Master"]


# ------------------------------------------------------------------------------------------------------------------ Ray


def test_the_job_for_ray(capsys):
    found = json.loads(
        printed(
            capsys, "--to", "ray", "--nodes", "2", "--devices", "4", "--env", "A=1", "--runtime-env", '{"pip": ["x"]}',
            "--working-dir", "src", "fit", "--model.name", "it's",
        )
    )  # fmt: skip
    words = ["trivet", "fit", "--model.name", "it's", "--launcher", "ray", "--num_nodes", "2", "--devices", "4"]
    assert shlex.split(found["entrypoint"]) == words
    assert found["submission_id"] == "trivet-fit"
    assert found["runtime_env"] == {"working_dir": "src", "pip": ["x"], "env_vars": {"A": "1"}}


# -------------------------------------------------------------------------------------------------------- handing over


@pytest.mark.parametrize(
    ("to", "program", "words", "begins"),
    [
        ("slurm", "sbatch", "", "#!/bin/bash"),
        ("kubeflow", "kubectl", "create -f -", "apiVersion: trainer.kubeflow.org/"),
    ],
)
def test_a_job_is_handed_to_the_clusters_program(to, program, words, begins, tmp_path, capsys, stub):
    stub(program, f'echo "$*" > {tmp_path}/words; cat > {tmp_path}/text; echo "Submitted batch job 7"')
    assert submit("--to", to, "fit") == 0
    assert capsys.readouterr().out == "Submitted batch job 7\n"
    assert (tmp_path / "words").read_text().strip() == words
    assert (tmp_path / "text").read_text().startswith(begins)
    stub(program, "echo 'invalid partition' >&2; exit 3")
    assert submit("--to", to, "fit") == 2
    assert "refused the job (exit code 3): invalid partition" in capsys.readouterr().err


def test_a_job_is_handed_to_rays_client(capsys, monkeypatch):
    taken: dict[str, Any] = {}

    class Client:
        def __init__(self, address: str) -> None:
            if "nobody" in address:
                raise ConnectionError("refused")
            taken["address"] = address

        def submit_job(self, **arguments: Any) -> str:
            taken.update(arguments)
            return arguments["submission_id"]

    ray, client = types.ModuleType("ray"), types.ModuleType("ray.job_submission")
    client.JobSubmissionClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.job_submission", client)
    assert submit("--to", "ray", "--address", "http://head:8265", "--name", "mine", "fit") == 0
    assert capsys.readouterr().out == "mine\n"
    assert taken["address"] == "http://head:8265"
    assert taken["entrypoint"].startswith("trivet fit --launcher ray")
    assert submit("--to", "ray", "--address", "http://nobody:1", "fit") == 2
    assert "the job server at http://nobody:1 did not take the job: refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("slurm", "'sbatch' is not installed here"),
        ("pytorchjob", "'kubectl' is not"),
        ("ray", "Ray is not installed here"),
    ],
)
def test_a_program_that_is_missing_is_named(to, message, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ray", None)
    options = ["--image", "x"] if to == "pytorchjob" else []
    assert submit("--to", to, *options, "fit") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "--dry-run" in error


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "slrm", "fit"], "no submitter is named 'slrm'. Did you mean 'slurm'?"),
        (["--to", "slurm"], "expected the command to submit after the options, one of fit, validate"),
        (["--to", "slurm", "plan"], "found 'plan'"),
        (
            ["--to", "slurm", "--devices", "4", "fit", "--devices", "2"],
            "--devices 4 of the job and --devices 2 of the com",
        ),
        (
            ["--to", "slurm", "--nodes", "4", "fit", "--num-nodes=2"],
            "--nodes 4 of the job and --num_nodes 2 of the com",
        ),
        (["--to", "slurm", "--nodes", "0", "fit"], "--nodes 0: expected a number from 1 up"),
        (["--to", "slurm", "--namespace", "x", "fit"], "--namespace: submitter 'slurm' (trivet "),
        (["--to", "kubeflow", "--requeue", "fit"], "--requeue: submitter 'kubeflow' (trivet "),
        (["--to", "slurm", "--nods", "2", "fit"], "--nods is not known. Did you mean --nodes?"),
        (["--to", "slurm", "--env", "A", "fit"], "--env 'A': expected NAME=VALUE"),
        (["--to", "slurm", "--time", "soon", "fit"], "--time 'soon': expected minutes"),
        (["--to", "slurm", "--signal", "USR1", "fit"], "--signal 'USR1': expected the seconds"),
        (["--to", "slurm", "--sbatch", "exclusive", "fit"], "--sbatch 'exclusive': expected one option"),
        (["--to", "slurm", "--name", 'a"b', "fit"], "job-name 'a\"b' cannot stand in a line of #SBATCH"),
        (["--to", "kubeflow", "--name", "My_Job", "fit"], "--name 'My_Job': Kubernetes expects"),
        (["--to", "pytorchjob", "fit"], "Add --image NAME"),
        (["--to", "ray", "--time", "5", "fit"], "--time and --memory: Ray's job server knows neither"),
        (["--to", "ray", "--runtime-env", "[", "fit"], "expected a JSON object"),
        (["--to", "slurm", "fit", "--comm_profile", "cuda"], "no communication profile is named 'cuda'. Did you mean"),
    ],
)
def test_mistakes_are_told_in_one_line(words, message, capsys):
    assert submit("--dry-run", *words) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("5:30", 330), ("2:00:00", 7200), ("1-12", 129600), ("1-0:30", 88200), ("2-00:00:10", 172810)],
)
def test_times_are_slurms(time, expected):
    assert seconds(time) == expected


@pytest.mark.parametrize("time", ["", "1h", "0", "-5", "1:2:3:4"])
def test_what_is_no_time(time):
    with pytest.raises(ConfigurationError, match="--time"):
        seconds(time)


def test_a_launcher_that_only_submits_is_pointed_to(capsys):
    assert entry.run(["fit", "--launcher", "slurm"], prog="trivet")[0] == 2
    assert "`trivet submit --to slurm ...` hands a command to slurm as a job" in capsys.readouterr().err
