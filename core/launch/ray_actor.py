"""The actor of one rank: holds the device, and looks after the worker process that uses it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..processes import end_stopped
from . import failures, profiles
from .failures import Failure
from .local import loopback
from .world import LAUNCH_DIR

_PERIOD_S = 0.1
_CHUNK = 64 * 2**20


class Facts(NamedTuple):
    """Where an actor is: the address of its machine, and the ids of the GPUs that it was given."""

    address: str
    gpus: list[str]


class News(NamedTuple):
    """What an actor has to say: how its rank failed, or what that says of another one; which signal asked it to stop;
    whether its process has ended."""

    failure: Failure | None = None
    asked: int = 0
    ended: bool = False


class Rank:
    """An actor class. The worker is a process of its own, since Ray tells neither the exit code nor the signal of an
    actor that ends, and since torch reads variables while it is loaded, which may happen before an actor is made."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.directory = Path(tempfile.mkdtemp(prefix="trivet-"))  # readable by this user alone
        (self.directory / "out").mkdir()
        self.process: subprocess.Popen[bytes] | None = None
        self.said = News()  # what the driver knows
        self.told: set[int] = set()  # of which ranks the driver said that they failed
        self.store: Any = None

    def facts(self) -> Facts:
        import ray

        context = ray.get_runtime_context()
        return Facts(ray.util.get_node_ip_address(), context.get_accelerator_ids().get("GPU", []))

    def serve(self, address: str) -> int:
        """Open the store in which the workers meet, on this address alone; return its port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        with socket.create_server((address, 0)) as server:
            port = int(server.getsockname()[1])
            self.store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(server.fileno())
            )
        return port

    def start(
        self, payload: bytes, settings: Mapping[str, Any], variables: Mapping[str, str], profile: str | None
    ) -> None:
        """Start the worker. ``variables`` are those of its rank; ``settings`` those of all ranks."""
        (self.directory / "payload").write_bytes(payload)
        path = [*settings["path"], *(entry for entry in sys.path if entry not in settings["path"])]
        cwd = settings["cwd"] if os.path.isdir(settings["cwd"]) else os.getcwd()
        processes = int(variables["LOCAL_WORLD_SIZE"])
        environ = profiles.values(profile, os.environ, processes)
        if variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]:
            environ |= loopback()
        mine = {"out_dir": str(self.directory / "out"), "path": path, "cwd": cwd, "environ": environ}
        (self.directory / "settings.json").write_text(json.dumps({**settings, **mine}))
        # not a process of Ray's: where the user's code calls ray.init there, it becomes a driver of the same cluster
        inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_JOB_ID", "RAY_RAYLET_PID", LAUNCH_DIR)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trivet.launch.worker", str(self.directory), str(os.getpid())],
            env=inherited | dict(variables),
            start_new_session=True,
        )

    def news(self) -> News:
        """Wait for news, a second at most. Called on another thread than `tell`."""
        assert self.process is not None
        limit = time.monotonic() + 1.0
        while time.monotonic() < limit:
            code = self.process.poll()
            asked = failures.asked_to_stop(self.directory)
            there = [one for one in failures.read(self.directory) if one.rank not in self.told]
            own = [one for one in there if one.rank == self.rank]
            if code is not None:
                done = code == 0 and (self.directory / f"done-{self.rank}").exists()
                silent = None if done or own else self._silent(code)
                return News(own[0] if own else silent, asked, ended=True)
            news = News(next(iter(own or there), None), asked)  # of another one: what the watchdog found
            if news != self.said:
                self.said = news
                return news
            time.sleep(_PERIOD_S)
        return self.said

    def _silent(self, code: int) -> Failure:
        return failures.without_words(self.rank, code, time.time(), follows=False, directory=self.directory)

    def tell(self, failure: Failure | None, asked: int, interrupt: bool) -> None:
        """Let this rank know that one has failed, which may be itself, or that it is asked to stop."""
        if failure is not None:
            self.told.add(failure.rank)
            with contextlib.suppress(OSError):  # a full disk: whoever calls ends this rank soon
                failures.write(self.directory, failure)
            if self.process is not None:
                end_stopped(self.process.pid)
        if asked:
            with contextlib.suppress(OSError):  # then the signal alone has to do
                failures.ask_to_stop(self.directory, asked)
        if interrupt and self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def left(self) -> list[str]:
        """The names of the files that the worker left for the caller."""
        return [path.name for path in (self.directory / "out").iterdir()]

    def read(self, name: str, offset: int) -> bytes:
        """A part of such a file; empty at its end."""
        with open(self.directory / "out" / name, "rb") as file:
            file.seek(offset)
            return file.read(_CHUNK)

    def end(self) -> None:
        """End the worker and what it started, and remove the directory."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def variables(rank: int, devices: int, nodes: int, address: str, port: int, gpus: Sequence[str]) -> dict[str, str]:
    """The variables of torch elastic for a rank. ``gpus``: those of all actors on its machine, by local rank."""
    values: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": devices * nodes,
        "LOCAL_RANK": rank % devices,
        "LOCAL_WORLD_SIZE": devices,
        "GROUP_RANK": rank // devices,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0's actor serves the store, not rank 0
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    if gpus:  # each actor sees its own alone, and no rank could reach another's directly
        values["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return {name: str(value) for name, value in values.items()}
