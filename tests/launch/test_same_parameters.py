"""What two processes train is what one process trains, whoever started them; see also Ray's, SLURM's and two nodes'."""

import os
import subprocess
import sys

import pytest
from clusters import COMMAND, TRAIN, free_port, trains_as_one_process
from full import FULL
from namespaces import why_not

STARTS = {
    "local": ["net.py", *COMMAND, "--devices", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "net.py", *COMMAND],
}
NODES = "two nodes on this machine"
if FULL or why_not():  # else test_two_nodes.py has them
    STARTS[NODES] = ["net.py", *COMMAND, "--num_nodes", "2", "--main_address", "127.0.0.1"]


@pytest.mark.parametrize("how", STARTS)
def test_parameters_are_those_of_one_process(tmp_path, how):
    (tmp_path / "net.py").write_text(TRAIN)
    command = [sys.executable, *STARTS[how], "--strategy", "ddp"]
    environ = {**os.environ, "OUT": str(tmp_path / "trained.pt"), "OMP_NUM_THREADS": "1"}
    if how != NODES:
        subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=120)
    else:
        command += ["--main_port", str(free_port()), "--node_rank"]
        nodes = [subprocess.Popen([*command, str(node)], cwd=tmp_path, env=environ) for node in range(2)]
        assert [node.wait(120) for node in nodes] == [0, 0]
    trains_as_one_process(tmp_path / "trained.pt")
