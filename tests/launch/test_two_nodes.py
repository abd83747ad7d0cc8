"""Two machines, which are network namespaces: torchrun in each, or Trivet's own launcher; and the cable is cut."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import COMMAND, TRAIN, trains_as_one_process
from full import FULL
from namespaces import ADDRESSES, CABLES, two, why_not

TIMEOUT_S = 15
CELLS = [(how, strategy) for how in ("fit", "torchrun") for strategy in ("ddp", "fsdp")]

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(240)]


def start(machines, folder, how, strategy, *flags, **variables):
    """The same command on both machines; in each a process group of its own."""
    folder.mkdir(parents=True)
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


@pytest.mark.parametrize("cells", [CELLS[:2], CELLS[2:]] if FULL else [[("fit", "ddp"), ("torchrun", "fsdp")]])
def test_two_machines_train_as_one_process_does(tmp_path, cells):
    """Two pairs of machines at once, with the same addresses."""
    with two() as one, two() as other:
        pairs = [(tmp_path / how / strategy, how, strategy) for how, strategy in cells]
        started = [start(machines, *pair) for machines, pair in zip((one, other), pairs, strict=True)]
        for (folder, *_), processes in zip(pairs, started, strict=True):
            codes, said = ended(folder, processes, 120)
            assert codes == [0, 0], said
            trains_as_one_process(folder / "trained.pt")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"] if FULL else ["ddp"])
def test_a_cut_cable_ends_both_sides_in_time(tmp_path, strategy):
    with two() as one, two() as other:
        pairs = [(tmp_path / how, machines, how) for machines, how in ((one, "fit"), (other, "torchrun"))]
        flags = (strategy, "--timeout", str(TIMEOUT_S))
        started = [start(machines, folder, how, *flags, SLOW="2") for folder, machines, how in pairs]
        until = time.monotonic() + 120
        while not all((folder / "trained.pt-begun").exists() for folder, *_ in pairs):
            assert [one.poll() for pair in started for one in pair] == [None] * 4
            assert time.monotonic() < until, left(tmp_path)
            time.sleep(0.05)
        until = time.monotonic() + TIMEOUT_S
        one.cut()
        other.cut()
        for (folder, *_), processes in zip(pairs, started, strict=True):
            codes, said = ended(folder, processes, until - time.monotonic())
            assert all(codes), said
            at = [rf"node {node} of 2 at {address} \(rank {node}\)" for node, address in enumerate(ADDRESSES)]
            assert re.search(f"lost {at[1]}: nothing was heard of it for", said[0]), said[0]
            assert re.search(f"lost {at[0]}: its store has not answered for", said[1]), said[1]
