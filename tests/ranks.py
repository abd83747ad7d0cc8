"""Two processes that stay alive for the whole test session and run functions together, as torchrun would start them.

Starting a process costs seconds; a run in one that is there costs milliseconds.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import cloudpickle

TIMEOUT_S = 60


class Pool:
    """Processes with the variables of torchrun, one per rank."""

    def __init__(self, world_size: int) -> None:
        self.connections: list[Connection] = []
        self.processes = []
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")  # what runs write beside their checkpoints
        port = str(free_port())
        for rank in range(world_size):
            ours, theirs = Pipe()
            variables = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *map(str, sys.path)]),
            }  # fmt: skip
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    cwd=self.directory.name,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {name: str(value) for name, value in variables.items()},
                )
            )
            theirs.close()
            self.connections.append(ours)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function returned, or the exception that it raised, by rank."""
        for connection in self.connections:
            connection.send_bytes(cloudpickle.dumps((list(sys.path), function, args)))
        outcomes = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S} s")
            outcomes.append(pickle.loads(connection.recv_bytes()))
        return outcomes

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for connection in self.connections:
            connection.close()
        self.directory.cleanup()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


_pool: Pool | None = None


def outcomes(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on two ranks; values and exceptions by rank. A rank that raised ends, and the next call starts new ones."""
    global _pool
    if _pool is None:
        _pool = Pool(2)
        atexit.register(_end)
    found: list[Any] = [EOFError()]
    try:
        found = _pool.run(function, *args)
    finally:
        if any(isinstance(outcome, BaseException) for outcome in found):
            _end()
    return found


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on two ranks; what each returned. Raises the exception of the lowest rank that raised one of its own."""
    found = outcomes(function, *args)
    if raised := [outcome for outcome in found if isinstance(outcome, BaseException)]:
        from trivet.errors import RankFailed

        raise next((error for error in raised if not isinstance(error, RankFailed)), raised[0])
    return found


def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run in this process, or on two ranks."""
    return [function(*args)] if world_size == 1 else on_two_ranks(function, *args)


def _end() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def serve(connection: Connection) -> None:
    """What each process of the pool does until its parent is gone."""
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        try:
            path, function, args = pickle.loads(data)
            sys.path[:] = path
            faulthandler.dump_traceback_later(TIMEOUT_S - 10)
            import torch

            torch.manual_seed(0)  # as the fixture for all tests does in the process that asks
            outcome = function(*args)
        except BaseException as error:
            error.add_note("".join(traceback.format_exception(error)))
            outcome = error
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(cloudpickle.dumps(outcome))
        if isinstance(outcome, BaseException):
            return  # as a script does; the others learn of it when its connections close


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
