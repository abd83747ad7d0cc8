"""How several nodes end, when a process of one of them is killed or asked to stop; two nodes on this machine."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from clusters import COMMAND, TRAIN, free_port
from full import FULL

KILLED = "rank {rank} failed with SIGKILL: the process was killed by signal 9"
# which process of which node gets which signal, the exit codes, and what both nodes say, as far as they can
ENDS = {
    "a worker is killed": ("worker", 1, signal.SIGKILL, [1, 1], [KILLED.format(rank=1)] * 2),
    "a worker of node 0 is killed": ("worker", 0, signal.SIGKILL, [1, 1], [KILLED.format(rank=0)] * 2),
    "the launcher of node 0 is killed": ("launcher", 0, signal.SIGKILL, [-9, 1], ["", "NodeLost: lost node 0 of 2"]),
    "the launcher of node 1 is killed": (
        "launcher",
        1,
        signal.SIGKILL,
        [1, -9],
        ["NodeLost: lost node 1 of 2", ""],
    ),
    "Ctrl-C on node 1": ("launcher", 1, signal.SIGINT, [130, 130], ["interrupted"] * 2),
    "SIGTERM on node 0": ("launcher", 0, signal.SIGTERM, [143, 143], ["SIGTERM: training ended after update", ""]),
}


def children(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    return [int(one) for one in found.split()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ENDS if FULL else list(ENDS)[:1])
def test_both_nodes_end(tmp_path, how):
    whom, node, number, codes, words = ENDS[how]
    (tmp_path / "net.py").write_text(TRAIN)
    environ = {**os.environ, "OUT": str(tmp_path / "trained.pt"), "SLOW": "0.3", "OMP_NUM_THREADS": "1"}
    where = ["--num_nodes", "2", "--main_address", "127.0.0.1", "--main_port", str(free_port()), "--node_rank"]
    flags = [*COMMAND, "--max_epochs", "90", "--strategy", "ddp", "--timeout", "20", *where]
    processes = [
        subprocess.Popen(
            [sys.executable, "net.py", *flags, str(rank)], cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    until = time.monotonic() + 120
    while not (tmp_path / "trained.pt-begun").exists():
        assert [process.poll() for process in processes] == [None, None]
        assert time.monotonic() < until
        time.sleep(0.05)
    workers = [child for process in processes for child in children(process)]
    os.kill(processes[node].pid if whom == "launcher" else children(processes[node])[0], number)
    said = [process.communicate(timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == codes, said
    for text, pattern in zip(said, words, strict=True):
        assert re.search(pattern, text), said

    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() < until
        time.sleep(0.05)
