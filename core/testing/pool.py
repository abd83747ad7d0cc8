"""A pool of worker processes that live as long as the test session: starting one costs seconds, a task costs little.

Every worker has torchrun's variables, so that `Trainer.fit` joins the run in the worker's own process. A task is a
module-level function that all ranks of one pool call with the same arguments; warnings in it are errors.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

AFTER_A_FAILURE_S = 15.0  # what the other ranks get to end by themselves
LOG_TAIL = 6000


@dataclass(frozen=True)
class Failure:
    """What one rank raised, as text."""

    type_name: str
    message: str
    traceback: str


class TaskFailed(Exception):
    """At least one rank failed or did not answer in time. ``failures``: rank -> Failure."""

    def __init__(self, task: str, failures: dict[int, Failure]) -> None:
        self.failures = failures
        texts = [f"--- rank {rank}: {f.type_name}: {f.message}\n{f.traceback}" for rank, f in sorted(failures.items())]
        super().__init__(f"{task} failed on rank {', '.join(map(str, sorted(failures)))}\n" + "\n".join(texts))


class Pool:
    """Workers of one world size, started by the first task and anew after a task that left them unusable."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.starts = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._logs: list[Path] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None  # the workers', for what runs leave behind

    def run(self, task: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call ``task(*args)`` on every rank; return the answers by rank or raise `TaskFailed`."""
        if not self._processes:
            self._start()
        payload = cloudpickle.dumps((task, args))
        for connection in self._connections:
            connection.send_bytes(payload)
        values, failures, usable = self._collect(timeout_s)
        name = getattr(task, "__name__", repr(task))
        if not usable:
            self.close()
        if failures:
            raise TaskFailed(f"{name} at world size {self.world_size}", failures)
        return [values[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.wait()
            connection.close()
        self._processes, self._connections, self._logs = [], [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        self.starts += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._directory = tempfile.TemporaryDirectory(
            prefix=f"trivet-pool-{self.world_size}-", ignore_cleanup_errors=True
        )
        directory = Path(self._directory.name)
        for rank in range(self.world_size):
            ours, theirs = socket.socketpair()
            log = directory / f"rank-{rank}.log"
            world = {
                "RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.world_size,
                "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            }  # fmt: skip
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-c", f"from {__name__} import work; work({theirs.fileno()})"],
                    env={**os.environ, **{key: str(value) for key, value in world.items()}},
                    pass_fds=[theirs.fileno()], cwd=directory,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                )  # fmt: skip
            theirs.close()
            self._processes.append(process)
            self._connections.append(Connection(ours.detach()))
            self._logs.append(log)

    def _collect(self, timeout_s: float) -> tuple[dict[int, Any], dict[int, Failure], bool]:
        values: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        usable = True
        pending = dict(enumerate(self._connections))
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(self._stuck(list(pending), timeout_s))
                return values, failures, False
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                try:
                    value, failure, clean = cloudpickle.loads(pending[rank].recv_bytes())
                except (EOFError, OSError):
                    code = self._processes[rank].wait()
                    value, failure, clean = None, Failure("Died", f"exit code {code}", self._log(rank)), False
                del pending[rank]
                usable &= clean
                values[rank] = value
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        return values, failures, usable

    def _stuck(self, ranks: list[int], timeout_s: float) -> dict[int, Failure]:
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGUSR1)  # faulthandler writes all stacks
        time.sleep(1.0)
        return {r: Failure("TimeoutError", f"no answer; the limit is {timeout_s:g} s", self._log(r)) for r in ranks}

    def _log(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-LOG_TAIL:]


class Pools:
    """One pool per world size."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __getitem__(self, world_size: int) -> Pool:
        return self._pools.setdefault(world_size, Pool(world_size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


# ------------------------------------------------------------------------------------------------------ in the worker


def work(descriptor: int) -> None:
    """A worker: answer tasks until the pool is gone."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(_answer(payload))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # a rank may wait in a collective for another that is gone


def _answer(payload: bytes) -> bytes:
    """(value, failure, whether this process can take another task)."""
    import torch.distributed as dist

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            task, args = cloudpickle.loads(payload)
            answer: bytes = cloudpickle.dumps((task(*args), None, not dist.is_initialized()))
    except BaseException as error:
        failure = Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
        answer = cloudpickle.dumps((None, failure, not dist.is_initialized()))
    return answer
