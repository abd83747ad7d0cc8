"""The local launcher: worker processes on this machine, under torch's own elastic agent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from . import failures, payload, profiles
from .launcher import Launcher
from .signals import Asking, judge, stopped_by

if TYPE_CHECKING:
    from ..plan import Plan

KILL_S = 8.0
"""How long after the first failure the remaining processes are killed, should they not have ended by themselves."""

_SLICE_S = 0.1


class Local(Launcher):
    """Processes on this machine, connected over the loopback interface. What ``launcher="auto"`` means."""

    def launch(self, function: str, parts: Mapping[str, Any], plan: Plan, *, run_dir: Path) -> None:
        launch(function, parts, plan.world_size, run_dir=run_dir, comm_profile=plan.comm_profile)


def launch(
    function: str, parts: Mapping[str, Any], world_size: int, *, run_dir: Path, comm_profile: str | None = None
) -> None:
    """Run ``function`` in ``world_size`` new processes on this machine and return when all have ended.

    ``function`` (``"package.module:name"``) is called in each as ``function(parts, world, run_dir)``; rank 0 leaves in
    ``run_dir``, an existing directory of the caller, what it has to return. Needs no main guard. Called on the main
    thread, SIGINT asks the workers to stop and a second one kills them; so do SIGTERM and, under SLURM, SIGUSR1. Raises
    LaunchError where something in ``parts`` cannot be handed over, RankFailed for the rank that failed first; where the
    workers stopped on request, KeyboardInterrupt after SIGINT and Terminated after the others.
    """
    data = payload.dumps(parts)
    directory = Path(tempfile.mkdtemp(prefix="trivet-"))  # readable by this user alone
    started = _Launch(directory, world_size)
    try:
        (directory / "payload").write_bytes(data)
        del data
        settings = {
            "function": function,
            "source": "local",
            "out_dir": str(run_dir.absolute()),
            "path": [str(entry) for entry in sys.path],
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "environ": profiles.values(comm_profile, os.environ, world_size) | _environ(world_size),
        }
        (directory / "settings.json").write_text(json.dumps(settings))
        started.run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _environ(world_size: int) -> dict[str, str]:
    """Variables for the workers, where the user has not set them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = {"OMP_NUM_THREADS": str(max(cores // world_size, 1))}
    return values | loopback()


def loopback() -> dict[str, str]:
    """Variables for workers that are all on one machine: collectives use its loopback interface."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


class _Launch:
    """One launch. The agent has a thread of its own: it blocks, and on the main thread it would take the signals."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self.directory, self.world_size = directory, world_size
        self.last_alive: dict[int, float] = {}
        self.asking = Asking(self._ask_to_stop, self._kill)
        self.pids: dict[int, int] = {}
        self.killed: set[int] = set()
        self.error: BaseException | None = None
        self.exit_codes: dict[int, int] = {}

    def run(self) -> None:
        agent = threading.Thread(target=self._agent, name="trivet-agent", daemon=True)
        with self.asking, _quiet():
            agent.start()
            try:
                self._wait(agent)
            finally:
                if agent.is_alive():  # only where a signal handler of somebody else raised into the wait
                    self._kill()
                    agent.join()
                if self.error is not None or self.asking.number:
                    self._kill()  # what workers started themselves, such as data-loader processes
        self._judge()

    def _agent(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        try:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=self.world_size,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=str(self.directory / "elastic")),
            )
            start = elastic_launch(config, entrypoint=sys.executable)
            start("-P", "-m", "trivet.launch.worker", str(self.directory), str(os.getpid()))
        except ChildFailedError as error:
            self.error = error
            self.exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except BaseException as error:
            self.error = error

    def _wait(self, agent: threading.Thread) -> None:
        deadline: float | None = None
        while agent.is_alive():
            agent.join(_SLICE_S)
            if deadline is None:
                if self._something_failed():
                    deadline = time.monotonic() + KILL_S
            elif time.monotonic() > deadline:
                self._kill()

    def _something_failed(self) -> bool:
        """Look at the workers; also notes when each was last seen alive, for those that die without a word."""
        now = time.time()
        ended = False
        for rank, pid in self._pids().items():
            if failures.is_running(pid):
                self.last_alive[rank] = now
            else:
                ended |= not (self.directory / f"done-{rank}").exists()
        records = failures.read(self.directory)
        asked = {record.rank for record in records if record.interrupt and not record.follows}
        return len(asked) < len(records) or (ended and not asked)

    def _pids(self) -> dict[int, int]:
        for rank in range(self.world_size):
            if rank not in self.pids:
                with contextlib.suppress(FileNotFoundError, ValueError):
                    self.pids[rank] = int((self.directory / f"pid-{rank}").read_text())
        return self.pids

    # requests to stop

    def _ask_to_stop(self, number: int) -> None:
        failures.ask_to_stop(self.directory, number)  # also for workers that are not there yet
        # SIGINT for all: to a worker SIGTERM may also mean that the agent ends it, since a peer has failed
        for pid in self._pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _kill(self) -> None:
        for rank, pid in self._pids().items():
            if failures.is_running(pid):
                self.killed.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # each worker leads a session of its own

    # the verdict

    def _judge(self) -> None:
        if self.asking.again:
            raise stopped_by(self.asking.number)
        found = failures.read(self.directory) + self._silent()
        if not found and self.error is not None:
            raise LaunchError(f"the workers could not be started: {self.error}") from self.error
        judge(found, self.asking.number)

    def _ended_well(self, rank: int) -> bool:
        never_started = self.error is not None and not self.exit_codes
        return never_started or (self.directory / f"done-{rank}").exists()

    def _silent(self) -> list[failures.Failure]:
        """Those that ended without a word. They died after they were last seen alive, so before others noticed."""
        silent = []
        for rank in range(self.world_size):
            code = self.exit_codes.get(rank, 0)
            if (self.directory / f"failure-{rank}").exists() or (code == 0 and self._ended_well(rank)):
                continue
            when = self.last_alive.get(rank, time.time())
            sent = rank in self.killed or code == -signal.SIGTERM
            silent.append(failures.without_words(rank, code, when, follows=sent))
        return silent


_quiet_lock = threading.Lock()
_quiet_count = 0


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch elastic's loggers: they print one rank's failure several times before the traceback is shown."""
    global _quiet_count
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torchelastic-events-null")
    loggers = [logging.getLogger(name) for name in names]
    handler = logging.NullHandler()
    with _quiet_lock:
        _quiet_count += 1
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_count -= 1
            last = _quiet_count == 0
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = logger.propagate or last
