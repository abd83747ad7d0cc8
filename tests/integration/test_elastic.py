"""Runs that lose a process go on: with as many, to the bit, or with fewer and the same samples in each update."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Server
from full import FULL
from trivet.checkpoint import directory
from trivet.checkpoint.newest import newest

HERE = Path(__file__).parent
COMMON = (
    "fit", "--accelerator", "cpu", "--enable_progress_bar", "false", "--log_every_n_steps", "1",
    "--callbacks", "Checkpoint", "--callbacks.every_n_updates", "2",
)  # fmt: skip
ENVIRON = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def server():
    found = Server()
    yield found
    found.close()


def unbroken(server, root, *flags, world_size):
    root.mkdir()
    ranks = server.start(*COMMON, *flags, "--default_root_dir", str(root), log=root / "log", world_size=world_size)
    ranks.wait(90)
    return rows(root), (root / "log").read_text()


def rows(root):
    """What was logged: by row its update and the values."""
    with (root / "version_0" / "metrics.csv").open() as file:
        return [(int(row.pop("step")), {k: v for k, v in row.items() if v}) for row in csv.DictReader(file)]


def command(root, *flags, before=()):
    root.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, *before, str(HERE / "going_on.py"), *COMMON, *flags, "--default_root_dir", str(root)],
        env=ENVIRON, cwd=root, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


def test_a_lost_worker_is_started_again_and_then_done_without(server, tmp_path):
    flags = (
        "--strategy", "ddp", "--max_steps", "12", "--precision", "fp64", "--data.batch_size", "2",
        "--data.samples", "32", "--global_batch_size", "8", "--model.dropout", "0", "--deterministic", "true",
    )  # fmt: skip
    expected, log = unbroken(server, tmp_path / "whole", *flags, world_size=4)
    assert expected[-1][0] == 12, log
    root = tmp_path / "killed"
    kills = ("--model.kill", "0 1 9,3 6 9", "--model.mark", str(root))  # the first before anything is saved
    done = command(root, *flags, *kills, "--devices", "4", "--max_restarts", "1", "--min-devices", "2")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("trivet: attempt")]
    assert "attempt 1: rank 0 failed with SIGKILL" in said[0]
    assert said[0].endswith("Attempt 2: restart 1 of 1 with 4 processes, from the beginning: nothing is saved yet")
    assert "attempt 2: rank 3 failed with SIGKILL" in said[1]
    assert "Attempt 3: with 2 processes instead of 4 (3 cannot share the 4 batches of an update), from /" in said[1]
    assert said[1].endswith("update=6 (1 epochs, 6 updates)")
    assert len(said) == 2
    attempts = (root / "version_0" / "logs" / "supervisor.log").read_text().splitlines()
    assert [line for line in attempts if line.startswith("trivet: attempt")] == said
    found = rows(root)
    as_many = [row for row in expected if row[0] <= 6]
    assert found[: len(as_many)] == as_many  # to the bit
    assert [(step, values.keys()) for step, values in found] == [(step, values.keys()) for step, values in expected]
    for (step, values), (_, others) in zip(found, expected, strict=True):
        for name in values.keys() - {"loss_step"}:  # that is of an update's last micro-batches, which are others now
            assert abs(float(values[name]) - float(others[name])) <= 1e-9, (step, name)
    assert {name for _, values in found for name in values} == {"epoch", "loss_step", "loss_epoch", "norm"}
    ends = [newest([tmp_path / run / "version_0" / "checkpoints"]) for run in ("whole", "killed")]
    one, other = (directory.read_weights(end.path) for end in ends)
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() <= 1e-9, name
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["version_0"]


def test_under_torchrun_a_restarted_run_goes_on_without_being_told(server, tmp_path):
    flags = ("--strategy", "ddp", "--max_steps", "10")
    expected, log = unbroken(server, tmp_path / "whole", *flags, world_size=2)
    assert expected[-1][0] == 10, log
    root = tmp_path / "killed"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    done = command(root, *flags, "--model.kill", "1 5 9", "--model.mark", str(root), before=torchrun)
    assert done.returncode == 0, done.stderr
    assert "trivet: going on from " in done.stderr
    assert rows(root) == expected
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["version_0"]


@pytest.mark.skipif(not FULL, reason="takes a minute; with TRIVET_CI_FULL=1 only")
def test_under_torchrun_a_machine_that_is_lost_leaves_the_others(server, tmp_path):
    flags = (
        "--strategy", "ddp", "--max_steps", "12", "--precision", "fp64", "--data.batch_size", "2",
        "--data.samples", "32", "--global_batch_size", "8", "--model.dropout", "0", "--model.pause", "0.05",
    )  # fmt: skip
    expected, log = unbroken(server, tmp_path / "whole", *flags, world_size=4)
    assert expected[-1][0] == 12, log
    root = tmp_path / "killed"
    root.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = (
        "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=lost",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2",
    )  # fmt: skip
    command = [sys.executable, *torchrun, str(HERE / "going_on.py"), *COMMON, *flags, "--default_root_dir", str(root)]
    agents = []
    for number in range(2):
        with (root / f"log-{number}").open("w") as out:
            agents.append(subprocess.Popen(command, env=ENVIRON, cwd=root, stdout=out, stderr=out))
        time.sleep(1)  # the first one serves the rendezvous
    place, limit = root / "version_0" / "checkpoints", time.monotonic() + 90
    while not list(place.glob("*update=4")):
        assert time.monotonic() < limit, (root / "log-0").read_text()
        time.sleep(0.01)
    children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    for pid in (agents[1].pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    agents[1].wait()
    assert agents[0].wait(150) == 0, (root / "log-0").read_text()
    found = rows(root)
    assert [step for step, _ in found] == [step for step, _ in expected]
    for (step, values), (_, others) in zip(found, expected, strict=True):
        for name in values.keys() - {"loss_step"}:
            assert abs(float(values[name]) - float(others[name])) <= 1e-9, (step, name)
    assert "trivet: going on from " in (root / "log-0").read_text()
