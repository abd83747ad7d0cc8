"""A server that has torch imported and forks the ranks of a run: real processes, each some milliseconds after asking.

``python forked.py`` reads a JSON object per line, ``{"argv": [...], "world_size": 2, "environ": {...}, "log": path}``,
and answers with the process ids of the ranks, which run ``trivet.cli(Net, Data)`` as torchrun would have started them,
or, with a world size of 0, as a shell does. To a list of ids it answers with their exit codes, when they have ended.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


class Server:
    """The test's side."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def start(self, *argv, log, world_size=2, **environ):
        """Fork the ranks, in a process group of their own."""
        return Ranks(self.ask({"argv": list(argv), "world_size": world_size, "log": str(log), "environ": environ}))

    def codes(self, ranks):
        """The exit codes of ranks, negative where a signal ended them."""
        return self.ask(ranks.pids)

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.kill()
        self.process.communicate()


class Ranks:
    def __init__(self, pids):
        self.pids = pids

    @property
    def alive(self):
        return [pid for pid in self.pids if os.path.exists(f"/proc/{pid}") and _state(pid) != "Z"]

    def kill(self):
        """SIGKILL to all of them, loader workers too, wherever they are."""
        os.killpg(self.pids[0], signal.SIGKILL)
        self.wait(10)

    def wait(self, seconds):
        limit = time.monotonic() + seconds
        while self.alive:
            assert time.monotonic() < limit, f"{self.alive} still run after {seconds} s"
            time.sleep(0.002)


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


# ------------------------------------------------------------------------------------------------------- the server


def warm():
    """Import what a run imports, once."""
    import scalar  # noqa: F401
    import torch
    import torch._dynamo  # fully_shard does, in seconds
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import trivet
    import trivet.commands.job
    import trivet.commands.parser
    import trivet.strategies.fsdp

    torch.set_num_threads(1)
    gc.freeze()  # collections in the ranks need not look at all that
    return trivet


def serve():
    sys.path.insert(0, str(Path(__file__).parent))
    sys.path.insert(0, str(Path(__file__).parents[1]))
    warm()
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, list):
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request]
            print(json.dumps(codes), flush=True)
            continue
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = []
        for rank in range(max(request["world_size"], 1)):
            pid = os.fork()
            if pid == 0:
                become(request, rank, port, pids)
            pids.append(pid)
            os.setpgid(pid, pids[0])
        print(json.dumps(pids), flush=True)


def become(request, rank, port, before):
    """In the child: one rank."""
    code = 1
    try:
        os.setpgid(0, before[0] if before else 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        size = request["world_size"]
        os.environ.update(request["environ"], GLOO_SOCKET_IFNAME="lo")
        world = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        os.environ.update(world if size else {})
        import trivet
        from going_on import Data, Net

        trivet.cli(Net, Data, args=request["argv"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
