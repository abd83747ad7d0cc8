"""The local launcher: worker processes on this machine, under torch's own elastic agent."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from ..processes import end_stopped, is_running
from . import failures, nodes, payload, profiles
from .environment import Node
from .launcher import Launcher
from .signals import Asking, judge, stopped_by

if TYPE_CHECKING:
    from ..plan import Plan
    from .meeting import Meeting
    from .nodes import News

KILL_S = 8.0
"""How long after the first failure the remaining processes are killed, should they not have ended by themselves."""

_SLICE_S = 0.1
_SILENT_S = 0.3
_BROKEN = re.compile(r"[Cc]onnection (closed|reset|refused)|remote worker|[Bb]roken pipe")
_STAY_S = 3.0


_launches = itertools.count()  # of this process: several nodes make the same ones in the same order


class Local(Launcher):
    """Processes on this machine, connected over the loopback interface. What ``launcher="auto"`` means.

    With ``--num_nodes``, ``--node_rank`` and ``--main_address``, or where an environment started one process on each
    machine, those of several machines: each starts its own.

    Args:
        wait_s: How long to wait, in seconds, until all nodes are there.
    """

    def __init__(self, wait_s: float = 300.0) -> None:
        self.wait_s = wait_s

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"node_by_node"})

    def launch(
        self,
        function: str,
        parts: Mapping[str, Any],
        plan: Plan,
        *,
        run_dir: Path,
        node: Node | None = None,
        timeout: float | None = None,
    ) -> None:
        launch(
            function, parts, plan.devices, run_dir=run_dir, comm_profile=plan.comm_profile, node=node,
            wait_s=self.wait_s, timeout=timeout,
        )  # fmt: skip


def launch(
    function: str,
    parts: Mapping[str, Any],
    devices: int,
    *,
    run_dir: Path,
    comm_profile: str | None = None,
    node: Node | None = None,
    wait_s: float = 300.0,
    timeout: float | None = None,
) -> None:
    """Run ``function`` in ``devices`` new processes on this machine and return when all have ended.

    ``function`` (``"package.module:name"``) is called in each as ``function(parts, world, run_dir)``; the first of them
    leaves in ``run_dir``, an existing directory of the caller, what it has to return. ``node`` says which machine this
    is, where each of several does the same; ``timeout`` within how many seconds all end when one is lost.

    Needs no main guard. Called on the main thread, SIGINT asks the workers to stop and a second one kills them; so do
    SIGTERM and, under SLURM, SIGUSR1. Raises LaunchError where something in ``parts`` cannot be handed over or a node
    does not come, RankFailed for the rank that failed first; where the workers stopped on request, KeyboardInterrupt
    after SIGINT and Terminated after the others.
    """
    data = payload.dumps(parts)
    directory = Path(tempfile.mkdtemp(prefix="trivet-"))  # readable by this user alone
    node = node or Node(0, 1, "127.0.0.1:0")
    started = _Launch(directory, devices, node, wait_s, timeout)
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
            "environ": profiles.values(comm_profile, os.environ, devices) | _environ(devices, node),
        }
        (directory / "settings.json").write_text(json.dumps(settings))
        started.run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _environ(devices: int, node: Node) -> dict[str, str]:
    """Variables for the workers, where the user has not set them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = {"OMP_NUM_THREADS": str(max(cores // devices, 1))}
    if node.num_nodes == 1:
        return values | loopback()
    # gloo would take the address that this machine's name has, which may be one that no other machine can reach
    name = nodes.interface_of(nodes.address_towards(*node.endpoint))
    return values | ({"GLOO_SOCKET_IFNAME": name} if name else {})


def loopback() -> dict[str, str]:
    """Variables for workers that are all on one machine: collectives use its loopback interface."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


class _Launch:
    """One launch. The agent has a thread of its own: it blocks, and on the main thread it would take the signals."""

    def __init__(self, directory: Path, devices: int, node: Node, wait_s: float, timeout: float | None) -> None:
        self.directory, self.devices, self.node = directory, devices, node
        self.wait_s, self.timeout = wait_s, timeout
        self.ranks = range(node.rank * devices, (node.rank + 1) * devices)  # those of this machine
        self.number = next(_launches)
        self.meeting: Meeting | None = None
        self.news: News | None = None  # of other machines
        self.elsewhere: failures.Failure | None = None  # what happened there, should the disk have no room for it
        self.asked = 0  # as in the directory
        self.last_alive: dict[int, float] = {}
        self.asking = Asking(self._ask_to_stop, self._kill)
        self.pids: dict[int, int] = {}
        self.killed: set[int] = set()
        self.given_up = False
        self.error: BaseException | None = None
        self.exit_codes: dict[int, int] = {}

    def run(self) -> None:
        agent = threading.Thread(target=self._agent, name="trivet-agent", daemon=True)
        with self.asking, _quiet():
            agent.start()
            try:
                self._wait(agent)
            finally:
                if agent.is_alive() and not self._all_done():
                    # only where a signal handler of somebody else raised into the wait
                    self.given_up = True
                    self._kill()
                    agent.join()
                if self.error is not None or self.asking.number:
                    self._kill()  # what workers started themselves, such as data-loader processes
                self._leave()
        self._judge()

    def _agent(self) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from .meeting import BACKEND, Meeting

        node, (host, port) = self.node, self.node.endpoint
        meeting = Meeting(
            node.rank, node.num_nodes, self.devices, host=host, port=port, launch=self.number, wait_s=self.wait_s,
            stopped=lambda: self.given_up or bool(self.asking.number), met=self._met,
        )  # fmt: skip
        try:
            config = LaunchConfig(
                min_nodes=node.num_nodes,
                max_nodes=node.num_nodes,
                nproc_per_node=self.devices,
                run_id=meeting.get_run_id(),
                rdzv_backend=BACKEND,
                rdzv_configs={"meeting": meeting},
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
        failed_at: float | None = None
        while agent.is_alive():
            agent.join(_SLICE_S)
            now = time.monotonic()
            if failed_at is None and self._something_failed():
                failed_at = now
            if self.news is not None:
                self._pass_on(self.news, silent=failed_at is not None and now > failed_at + _SILENT_S)
                if self.news.lost() is not None and self._all_done():
                    return  # the agent may wait for that node
            if failed_at is not None:
                # torch's agent would wait 30 s for those
                self.killed.update(rank for rank, pid in self._pids().items() if end_stopped(pid))
                if now > failed_at + KILL_S:
                    self._kill()

    def _something_failed(self) -> bool:
        """Look at the workers; also notes when each was last seen alive, for those that die without a word."""
        now = time.time()
        ended = False
        for rank, pid in self._pids().items():
            if is_running(pid):
                self.last_alive[rank] = now
            else:
                ended |= not (self.directory / f"done-{rank}").exists()
        records = self._records()
        asked = {record.rank for record in records if record.interrupt and not record.follows}
        return len(asked) < len(records) or (ended and not asked)

    def _pids(self) -> dict[int, int]:
        for rank in self.ranks:
            if rank not in self.pids:
                with contextlib.suppress(FileNotFoundError, ValueError):
                    self.pids[rank] = int((self.directory / f"pid-{rank}").read_text())
        return self.pids

    def _all_done(self) -> bool:
        return all((self.directory / f"done-{rank}").exists() for rank in self.ranks)

    # requests to stop

    def _ask_to_stop(self, number: int) -> None:
        self.asked = self.asked or number
        with contextlib.suppress(OSError):  # a full disk: then the signal alone has to do
            failures.ask_to_stop(self.directory, number)  # also for workers that are not there yet
        # SIGINT for all: to a worker SIGTERM may also mean that the agent ends it, since a peer has failed
        for pid in self._pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)

    def _kill(self) -> None:
        for rank, pid in self._pids().items():
            if is_running(pid):
                self.killed.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # each worker leads a session of its own

    # other nodes

    def _met(self, meeting: Meeting) -> None:
        """Called by the agent's thread when all nodes are there."""
        self.meeting = meeting
        if meeting.num_nodes > 1:
            store, own, name = (
                meeting.another_client("news"),
                self.node.rank,
                nodes.address_towards(*self.node.endpoint),
            )
            many = meeting.num_nodes
            beats = nodes.Beats(store, own, many, self.devices, tells=own == 0, name=name, timeout=self.timeout)
            self.news = nodes.News(store, beats, many).start()

    def _pass_on(self, news: News, *, silent: bool) -> None:
        """Tell the other nodes what happened here, and our workers what happened there.

        ``silent``: also of those that ended without a word. Until a moment later their exit code may become known.
        """
        broke = any(_BROKEN.search(one.message) for one in failures.read(self.directory) if one.rank in self.ranks)
        failure = news.failed or (None if self._all_done() else news.lost(suspected=broke))
        if failure is not None:
            if news.failed is None:
                news.post(failure)  # before our own, which follows from it
            if failure.rank not in self.ranks or failure.type_name == nodes.LOST:
                # without a time: it counts as the first, whatever the clocks of two machines say
                told = failures.Failure(failure.rank, failure.type_name, failure.message, failure.traceback)
                self.elsewhere = told
                with contextlib.suppress(OSError):  # a full disk; tried again at the next look
                    failures.write(self.directory, told)
        elif news.failed is None:
            self._post(news, self._silent() if silent else [])
        asked = failures.asked_to_stop(self.directory) or self.asked
        if news.asked and not asked:
            self._ask_to_stop(news.asked)
        elif asked and not news.asked:
            news.ask(asked)

    def _post(self, news: News, silent: list[failures.Failure]) -> None:
        own = [one for one in failures.read(self.directory) + silent if one.rank in self.ranks]
        failed = [one for one in own if not one.follows and not one.interrupt]
        if failed:
            news.post(min(failed, key=lambda one: one.time).error())

    def _leave(self) -> None:
        """Leave the other nodes. Node 0 stays until they have left, since the store goes with it; only a little where
        something failed, which they have yet to read."""
        if (news := self.news) is None or self.meeting is None:
            return
        if news.failed is None:
            self._post(news, self._silent())
        until = time.monotonic() + _STAY_S
        while self.node.rank == 0 and not news.alone and news.lost() is None:
            if time.monotonic() > until and (self.error or self.asking.number or news.failed):
                break
            time.sleep(_SLICE_S)
        news.stop()
        self.meeting.close()

    # the verdict

    def _judge(self) -> None:
        if self.asking.again:
            raise stopped_by(self.asking.number)
        found = self._records() + self._silent()
        if not found and isinstance(self.error, LaunchError) and not self.asking.number:
            raise self.error
        if not found and self.error is not None and not self.asking.number:
            raise LaunchError(f"the workers could not be started: {self.error}") from self.error
        judge(found, self.asking.number)

    def _records(self) -> list[failures.Failure]:
        records = failures.read(self.directory)
        if self.elsewhere is not None and all(one.rank != self.elsewhere.rank for one in records):
            records.append(self.elsewhere)
        return records

    def _ended_well(self, rank: int) -> bool:
        never_started = self.error is not None and not self.exit_codes
        return never_started or (self.directory / f"done-{rank}").exists()

    def _silent(self) -> list[failures.Failure]:
        """Those that ended without a word. They died after they were last seen alive, so before others noticed."""
        silent = []
        for rank in self.ranks:
            code = self.exit_codes.get(rank, 0)
            if (self.directory / f"failure-{rank}").exists() or (code == 0 and self._ended_well(rank)):
                continue
            when = self.last_alive.get(rank, time.time())
            sent = rank in self.killed or code == -signal.SIGTERM
            silent.append(failures.without_words(rank, code, when, follows=sent, directory=self.directory))
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
