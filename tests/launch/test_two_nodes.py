"""Two machines, which are network namespaces: torchrun in each, or Trivet's own launcher; and the cable is cut."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import COMMAND, TRAIN, trains_as_one_process
from namespaces import ADDRESSES, CABLES, two, why_not

FULL = os.environ.get("TRIVET_CI_FULL") == "1"
TIMEOUT_S = 15
CELLS = [(how, strategy) for how in ("fit", "torchrun") for strategy in ("ddp", "fsdp")]
COVER = CELLS if FULL else [("fit", "ddp"), ("torchrun", "fsdp")]

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(240)]


@pytest.fixture
def machines():
    with two() as made:
        yield made


def start(machines, folder, how, strategy, *flags, **variables):
    """The same command on both machines; in each a process group of its own."""
    (folder / "net.py").write_text(TRAIN)
    flags = [*COMMAND, "--strategy", strategy, *flags]
    found = []
    for node, cable in enumerate(CABLES):
        if how == "fit":
            where = ["--num_nodes", "2", "--node_rank", str(node), "--main_address", ADDRESSES[0]]
            command = [sys.executable, "net.py", *flags, *where]
        else:
            agent = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", ADDRESSES[0], "--master-port", "29500"]
            command = [sys.executable, "-m", "torch.distributed.run", *agent, "net.py", *flags]
            variables |= {"GLOO_SOCKET_IFNAME": cable}
        environ = {**os.environ, "OUT": str(folder / "trained.pt"), "OMP_NUM_THREADS": "1", **variables}
        words = [*machines.inside(node), *command]
        with open(folder / f"log-{node}", "w") as log:
            found.append(
                subprocess.Popen(words, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True)
            )
    return found


def ended(folder, processes, seconds):
    """The exit codes and what was said, once all have ended, with what they had started."""
    until = time.monotonic() + seconds
    try:
        codes = [process.wait(max(until - time.monotonic(), 0.1)) for process in processes]
    except subprocess.TimeoutExpired:
        for node in range(2):
            print((folder / f"log-{node}").read_text())
        raise
    finally:
        for process in processes:
            process.kill()
    time.sleep(0.5)
    assert left(folder) == []
    return codes, [(folder / f"log-{node}").read_text() for node in range(2)]


def left(folder):
    """Processes that work in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.readlink(entry / "cwd") == str(folder) and "Z" not in (entry / "stat").read_text().split()[2]:
                    found.append((entry.name, (entry / "cmdline").read_bytes()))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(("how", "strategy"), COVER)
def test_two_machines_train_as_one_process_does(tmp_path, machines, how, strategy):
    codes, said = ended(tmp_path, start(machines, tmp_path, how, strategy), 120)
    assert codes == [0, 0], said
    trains_as_one_process(tmp_path / "trained.pt")


@pytest.mark.parametrize(("how", "strategy"), CELLS if FULL else [("fit", "ddp"), ("torchrun", "ddp")])
def test_a_cut_cable_ends_both_sides_in_time(tmp_path, machines, how, strategy):
    processes = start(machines, tmp_path, how, strategy, "--timeout", str(TIMEOUT_S), SLOW="2")
    until = time.monotonic() + 120
    while not (tmp_path / "trained.pt-begun").exists():
        assert [one.poll() for one in processes] == [None, None]
        assert time.monotonic() < until, left(tmp_path)
        time.sleep(0.05)
    machines.cut()
    codes, said = ended(tmp_path, processes, TIMEOUT_S)
    assert all(codes), said
    assert re.search(rf"lost node 1 of 2 at {ADDRESSES[1]} \(rank 1\): nothing was heard of it for", said[0]), said[0]
    assert re.search(rf"lost node 0 of 2 at {ADDRESSES[0]} \(rank 0\): its store has not answered for", said[1]), said[
        1
    ]
