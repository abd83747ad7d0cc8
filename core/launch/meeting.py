"""Meeting: where torch's agents of a run find each other. One store, on one address, and nothing of it is unpickled."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from ..errors import LaunchError

BACKEND = "trivet"
"""Our name among torch elastic's rendezvous backends. Its own ``c10d`` and ``static`` listen on every interface of the
machine, also for a run on loopback, and ``c10d`` unpickles what it finds in the store."""

_POLL_S = 0.1
_COMPARE_S = 1.0


class Meeting(RendezvousHandler):
    """The agents of ``num_nodes`` machines, each with ``devices`` processes. Node 0 opens the store at ``host``.

    ``port`` 0 is one that the system chooses: for a single node. ``launch`` counts the launches of this process, which
    are the same on all nodes. ``stopped`` ends the waiting for the others, which takes ``wait_s`` at most; ``met`` is
    called when they are here.
    """

    def __init__(
        self,
        node_rank: int = 0,
        num_nodes: int = 1,
        devices: int = 1,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        launch: int = 0,
        wait_s: float = 300.0,
        stopped: Callable[[], bool] = lambda: False,
        met: Callable[[Meeting], None] = lambda meeting: None,
    ) -> None:
        self.node_rank, self.num_nodes, self.devices, self.launch = node_rank, num_nodes, devices, launch
        self.host, self.port = host, port
        self.stopped, self.met, self.wait_s = stopped, met, wait_s
        self.store: Any = None  # of this node's agent; whoever else talks to the others has a clone
        self.run_id = uuid.uuid4().hex  # node 0's, on all of them

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every node is here, with the same facts. Raises LaunchError for those that are not."""
        self._deadline = time.monotonic() + self.wait_s
        store = self._open() if self.node_rank == 0 else self._find()
        if self.num_nodes > 1:
            self._greet(store)
        self.store = store
        self.met(self)
        where = RendezvousStoreInfo(self.host, self.port)
        return RendezvousInfo(PrefixStore("agents", store), self.node_rank, self.num_nodes, where)

    def another_client(self, name: str) -> Store:
        """A client of the store with keys of its own: one that waits for an answer keeps others from asking."""
        return PrefixStore(name, self.store.clone())

    def close(self) -> None:
        """Let go of the store, which ends with node 0."""
        self.store = None

    def _open(self) -> TCPStore:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server((self.host, self.port), family=family, backlog=2048)
        except OSError as error:
            where = f"{self.host}:{self.port}"
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"node 0 cannot open port {self.port} at {self.host!r}: another process has it. Give all nodes "
                    "another --main_port."
                ) from error
            raise LaunchError(
                f"node 0 cannot wait for the others at {where} ({error}). --main_address has to be an address, or the "
                "name, of node 0 itself, by which the other nodes reach it."
            ) from error
        with listening:
            self.port = int(listening.getsockname()[1])
            own = os.dup(listening.fileno())
            store = TCPStore(self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=own)
        store.set("launch", json.dumps([self.launch, self.run_id]))
        return store

    def _find(self) -> TCPStore:
        """Connect to node 0, which may not be there yet, or may still be in the launch before."""
        reason = "it was stopped"
        while not self._over():
            try:
                socket.create_connection((self.host, self.port), timeout=1.0).close()
                store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=30))
                theirs, self.run_id = json.loads(store.get("launch"))
            except (OSError, RuntimeError) as error:
                reason = str(error).partition("\n")[0]
            else:
                if theirs == self.launch:
                    return store
                if theirs > self.launch:
                    raise LaunchError(
                        f"node 0 is in its launch number {theirs + 1}, node {self.node_rank} in number "
                        f"{self.launch + 1}. Start the same command on every node, at the same time."
                    )
                del store
                reason = f"it is still in its launch number {theirs + 1}"
            time.sleep(_POLL_S)
        raise LaunchError(
            f"node {self.node_rank} did not reach node 0 at {self.host}:{self.port} within {self.wait_s:g} s: {reason}."
            " Start the same command on every node, and give each of them the address and port at which it reaches "
            "node 0 (--main_address, --main_port)."
        )

    def _greet(self, store: TCPStore) -> None:
        """Say who this is, wait for the others, and compare."""
        facts = {"num_nodes": self.num_nodes, "devices": self.devices}
        mine = json.dumps({**facts, "host": socket.gethostname(), "process": os.getpid(), "this": uuid.uuid4().hex})
        names = [f"node/{node}" for node in range(self.num_nodes)]
        try:
            if (there := store.compare_set(names[self.node_rank], "", mine).decode()) != mine:
                raise LaunchError(
                    f"--node_rank {self.node_rank} was given twice: to this process on {socket.gethostname()!r} and to "
                    f"{_whose(json.loads(there))}. Each node has a number of its own, from 0 to {self.num_nodes - 1}."
                )
            while missing := [node for node, name in enumerate(names) if not store.check([name])]:
                self._compare(store, [name for node, name in enumerate(names) if node not in missing], facts)
                if self._over():
                    raise LaunchError(
                        f"waited {self.wait_s:g} s for {self.num_nodes} nodes at {self.host}:{self.port}; nothing came "
                        f"from node {', '.join(map(str, missing))}. Start the same command there, each with its own "
                        "--node_rank."
                    )
                time.sleep(_POLL_S)
            self._compare(store, names, facts)
        except LaunchError:
            if self.node_rank == 0:
                time.sleep(_COMPARE_S)  # the others find the same, as long as the store is here
            raise
        except RuntimeError as error:
            raise LaunchError(
                f"node 0 at {self.host}:{self.port} ended before all nodes were there. What it said tells why."
            ) from error

    def _compare(self, store: TCPStore, names: list[str], facts: dict[str, int]) -> None:
        for name in names:
            theirs = json.loads(store.get(name))
            for fact, value in facts.items():
                if theirs[fact] != value:
                    raise LaunchError(
                        f"node {self.node_rank} has {fact}={value}, and node {name.partition('/')[2]} "
                        f"{fact}={theirs[fact]} ({_whose(theirs)}). Give all nodes the same."
                    )

    def _over(self) -> bool:
        return self.stopped() or time.monotonic() > self._deadline

    # what torch's agent asks besides

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def _whose(greeting: dict[str, Any]) -> str:
    return f"process {greeting['process']} on {greeting['host']!r}"


def _given(parameters: RendezvousParameters) -> RendezvousHandler:
    meeting: Meeting = parameters.config["meeting"]
    return meeting


rendezvous_handler_registry.register(BACKEND, _given)
