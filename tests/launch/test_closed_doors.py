"""Closed doors: who can reach a run on one machine, what is left of it, and what is unpickled."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trivet
from trivet import accelerators, precision, strategies
from trivet.launch import worker

KINDS = (accelerators, precision, strategies)

# Runs a launch, and has each rank look at the sockets of all that belong to it.
LOOKS = """
import json, os, sys, time
from pathlib import Path

seen = []
sys.addaudithook(lambda event, args: seen.append(f"{args[0]}.{args[1]}") if event == "pickle.find_class" else None)

import torch, trivet

def listening(process):
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir() if fd.exists()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1].partition(":")[0])
    return found

def look(runtime, waits):
    runtime.gather(torch.ones(1))
    directory = Path(os.environ["TRIVET_LAUNCH_DIR"])
    mine = {
        "sockets": listening(os.getpid()), "parents": listening(os.getppid()), "directory": str(directory),
        "modes": sorted({oct(path.stat().st_mode & 0o777) for path in [directory]}),
    }
    Path(f"found-{runtime.world.rank}").write_text(json.dumps(mine))
    runtime.gather(torch.ones(1))
    time.sleep(600 if waits else 0)

if __name__ == "__main__":
    runtime = trivet.Runtime(accelerator="cpu", devices=2, strategy="ddp")
    begin = len(seen)
    runtime.launch(look, len(sys.argv) > 1)
    Path("unpickled").write_text(json.dumps(seen[begin:]))
"""


def start(folder, *words):
    (folder / "looks.py").write_text(LOOKS)
    environ = {**os.environ, "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    (folder / "tmp").mkdir()
    return subprocess.Popen([sys.executable, "looks.py", *words], cwd=folder, env=environ)


def found(folder):
    return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(2)]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_two_runs_at_once_listen_on_loopback_alone_and_leave_nothing(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    assert [process.wait(120) for process in list(map(start, folders))] == [0, 0]
    for folder in folders:
        sockets = [address for one in found(folder) for address in (*one["sockets"], *one["parents"])]
        assert len(sockets) >= 4  # the store, as both ranks see it, and gloo's
        assert set(sockets) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
        assert [one["modes"] for one in found(folder)] == [["0o700"]] * 2
        assert list((folder / "tmp").iterdir()) == []
        assert json.loads((folder / "unpickled").read_text()) == []
    assert len({one["directory"] for folder in folders for one in found(folder)}) == 2


def test_a_killed_launcher_leaves_neither_processes_nor_what_it_handed_over(tmp_path):
    process = start(tmp_path, "waits")
    until = time.monotonic() + 120
    while not all((tmp_path / f"found-{rank}").exists() for rank in range(2)):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    directory = Path(found(tmp_path)[0]["directory"])
    assert directory.is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait()
    while directory.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_worker_loads_nothing_from_a_directory_that_others_can_open(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="is not a private directory of this user; nothing is loaded from it"):
        worker.main(tmp_path, os.getpid())


UNPICKLES = {
    "launch/failures.py": "records of the launch's private directory, which its own workers wrote",
    "launch/worker.py": "the payload in the launch's private directory",
    "runtime.py": "what its own workers left in a private directory",
    "workers.py": "what its own workers left in a private directory",
    "testing/pool.py": "what its own children send through a pipe",
    "testing/declared.py": "what it has pickled itself",
    "callbacks/prediction_writer.py": "files of the run's directory, which its ranks wrote",
    "checkpoint/tensors.py": "files of a checkpoint, by an unpickler that knows some classes alone",
    "checkpoint/index.py": "files of a checkpoint, by an unpickler that knows some classes alone",
    "checkpoint/archive.py": "files of a checkpoint, by an unpickler that knows some classes alone",
}
"""Where bytes are unpickled, and whose they are. None of them came over the network."""


def test_nothing_else_is_unpickled():
    """Beside torch's own collectives of objects, which are between members of the group."""
    roots = [Path(trivet.__file__).parent, *(Path(path) for kind in KINDS for path in kind.__path__)]
    named = set()
    for root, path in ((folder, path) for folder in roots for path in folder.rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            unsafe = any(one.arg == "weights_only" and ast.unparse(one.value) == "False" for one in call.keywords)
            if unsafe or ast.unparse(call.func).endswith(("pickle.loads", "pickle.load", "Unpickler")):
                named.add(path.relative_to(root).as_posix())
    assert named == set(UNPICKLES)
