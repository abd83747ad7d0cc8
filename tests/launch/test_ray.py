"""The Ray launcher: real actors, in a network namespace that has only loopback, since Ray binds the host's address."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clusters import COMMAND, TRAIN, trains_as_one_process

ALONE = ("unshare", "-n" if os.geteuid() == 0 else "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def alone() -> str:
    """Why there can be no namespace here."""
    if not all(map(shutil.which, ("unshare", "ip"))):
        return "unshare or ip is not installed"
    done = subprocess.run([*ALONE, "true"], capture_output=True, text=True)
    return f"no network namespace: {done.stderr.strip()}" if done.returncode else ""


pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (trivet[ray])"),
    pytest.mark.skipif(bool(alone()), reason=alone()),
    pytest.mark.timeout(400),
]


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (root / "net.py").write_text(TRAIN)
    variables = {"PYTHONPATH": str(root), "HOME": str(root), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [*ALONE, sys.executable, *words], cwd=root, env=environ | variables, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    root = tmp_path_factory.mktemp("ray")
    done = run(root, str(Path(__file__).with_name("rayed.py")), str(root))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["two", "nodes"])
def test_actors_train_as_one_process_does(cells, how):
    cell = cells[how]
    assert (cell["error"], cell["updates"], cell["workers"], cell["alive"]) == (None, 8, 2, [])
    trains_as_one_process(
        {
            "weight": torch.tensor(cell["weights"], dtype=torch.float64),
            "bias": torch.tensor(cell["bias"], dtype=torch.float64),
        }
    )


@pytest.mark.parametrize(
    ("how", "type_name", "text"),
    [
        ("raise", "Boom", "boom 7"),
        ("exit", "exit code 3", "the process ended without an exception"),
        ("kill", "SIGKILL", "the process was killed by signal 9"),
        ("actor", "ActorDiedError", "its Ray actor is gone (killed, out of memory, or with its machine)"),
    ],
)
def test_the_first_failing_rank_is_named(cells, how, type_name, text):
    cell = cells[how]
    assert cell["error"] == [1, type_name]
    assert cell["text"].startswith(f"rank 1 failed with {type_name}: {text}")
    assert cell["seconds"] < 10  # what is asked for
    assert cell["alive"] == []
    if how == "raise":
        assert cell["cause"] == "Boom"
        assert "on_train_batch_end" in cell["trace"].splitlines()[1]  # begins with the user's frames


def test_failed_actors_are_started_again_from_the_newest_checkpoint(cells):
    assert (cells["restart"]["error"], cells["restart"]["updates"]) == (None, 8)
    assert cells["restart"]["weights"] == cells["two"]["weights"]


def test_a_signal_to_the_driver_asks_all_ranks_to_stop(cells):
    number, update, saved = cells["asked"]["stopped"]
    assert (number, saved, cells["asked"]["alive"]) == (15, True, [])
    assert 3 <= update < 8


def test_no_room(cells):
    assert "within 1 s it did not give {'CPU': 18.0} on each of 1 machines" in cells["room"]


def test_no_placement_group_is_left(cells):
    assert cells["groups"] == ["REMOVED"]


def test_a_ray_of_its_own(tmp_path):
    """Nothing was initialised: Ray is started for the command, and ends with it."""
    fails = "print('batch', batch_idx); assert batch_idx < 3, 'boom'"
    (tmp_path / "bad.py").write_text(TRAIN.replace("        mark = Path", f"        {fails}\n        mark = Path"))
    done = run(tmp_path, "bad.py", *COMMAND, "--devices", "2", "--strategy", "ddp", "--launcher", "ray")
    assert done.returncode == 1
    # Ray and torch look for names and routes, which are not in this namespace
    lines = [line for line in done.stderr.splitlines() if "network_util.cc" not in line and "[c10d]" not in line]
    assert lines[0].startswith("Traceback"), done.stderr
    assert done.stderr.count(fails) == 1
    assert "batch 2" in done.stdout + done.stderr  # what workers print comes through Ray's logs
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""
