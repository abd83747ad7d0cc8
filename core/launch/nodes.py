"""Nodes: what the machines of a run tell one another through its store, and which of them is lost."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from ..errors import RankFailed
from . import watch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

LOST = "NodeLost"
"""The ``type_name`` of a `RankFailed` for a machine that nothing is heard of."""

LOST_S = 60.0
"""How long nothing is heard of a machine until it counts as lost, where no shorter time-out was asked for."""

_END_S = watch.GRACE_S + 5.0  # how long after that the ranks of the others may still need to end
_PERIOD_S = 0.5
_STOP_S = 3.0


class News:
    """The first failure, a request to stop, and signs of life of each node, passed on from a thread of its own.

    A thread, since a store whose connection is cut answers never, and says nothing of it. ``store`` is a client that
    nobody else uses. ``devices`` counts the processes of a node; ``name`` is what the others call this one. One of node
    0's ``tells`` of nodes that are lost. ``timeout``: within how many seconds the run is to end after that.
    """

    def __init__(
        self,
        store: Store,
        node_rank: int,
        num_nodes: int,
        devices: int,
        *,
        tells: bool,
        name: str = "",
        timeout: float | None = None,
    ) -> None:
        self.failed: RankFailed | None = None  # the first that was posted, of any rank
        self.asked = 0  # which signal asked the run to stop
        self.alone = num_nodes == 1  # whether all other nodes have left; known on node 0
        self._store, self._own, self._devices, self._name = store, node_rank, devices, name
        self._tells, self._limit_s = tells, lost_after(timeout)
        self._answered = time.monotonic()
        self._beats = [0] * num_nodes
        self._names = [""] * num_nodes
        self._heard = [time.monotonic()] * num_nodes
        self._gone = ""  # why the store can no longer be asked
        self._to_post: list[RankFailed] = []
        self._to_ask = 0
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trivet-news", daemon=True)

    def start(self) -> News:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Say what is left to say, and wait until the store is no longer asked: a thread inside its C++ code while
        Python ends aborts the process."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(0.0 if self.lost() is not None and not self._tells else _STOP_S)  # it may hear nothing more

    def post(self, failure: RankFailed) -> None:
        """Tell the others that a rank of this node failed; of all that are told, the first one counts."""
        self._to_post.append(failure)
        self._wake.set()

    def ask(self, number: int) -> None:
        """Ask all ranks to stop, because of this signal."""
        self._to_ask = number
        self._wake.set()

    def lost(self) -> RankFailed | None:
        """The first node that nothing was heard of for too long. Talks to nobody.

        Node 0, where the store is, looks after the others, and posts it; they look after their connection to it.
        """
        if len(self._beats) == 1:
            return None
        if not self._tells:
            silent = time.monotonic() - self._answered
            why = self._gone or (f"its store has not answered for {silent:.0f} s" if silent > self._limit_s else "")
            return self._lost(0, why) if why else None
        for node, heard in enumerate(self._heard):
            silent = time.monotonic() - heard
            if self._beats[node] and silent > self._limit_s:  # a node that has yet to begin may take its time
                return self._lost(node, f"nothing was heard of it for {silent:.0f} s")
        return None

    def _lost(self, node: int, why: str) -> RankFailed:
        first = node * self._devices
        ranks = f"rank {first}" if self._devices == 1 else f"ranks {first} to {first + self._devices - 1}"
        where = f" at {self._names[node]}" if self._names[node] else ""
        text = f"lost node {node} of {len(self._beats)}{where} ({ranks}): {why}. The machine, its network or its "
        return RankFailed(first, LOST, text + "processes are gone.")

    def _run(self) -> None:
        while True:
            self._wake.clear()
            last = self._stopped.is_set()
            try:
                self._round()
                if last:
                    self._store.add("left", 1)
            except RuntimeError as error:  # the store went with the process that held it
                self._gone = str(error).partition("\n")[0]
                return
            if last:
                return
            self._wake.wait(_PERIOD_S)

    def _round(self) -> None:
        store = self._store
        while self._to_post:
            failure = self._to_post.pop(0)
            record = [failure.rank, failure.type_name, failure.message, failure.traceback]
            store.compare_set("failed", "", json.dumps(record))
        if self._to_ask:
            store.compare_set("stop/asked", "", str(self._to_ask))
            self._to_ask = 0
        if self.failed is None and store.check(["failed"]):
            self.failed = RankFailed(*json.loads(store.get("failed")))
        if not self.asked and store.check(["stop/asked"]):
            self.asked = int(store.get("stop/asked"))
        if len(self._beats) > 1:
            self._beat()

    def _beat(self) -> None:
        store = self._store
        if not self._beats[self._own]:
            store.set(f"node/{self._own}", self._name or socket.gethostname())
        store.add(f"beat/{self._own}", 1)
        self._beats[self._own] += 1
        self._answered = time.monotonic()
        if not self._names[0] and store.check(["node/0"]):
            self._names[0] = store.get("node/0").decode()
        if not self._tells:
            return
        self.alone = store.add("left", 0) >= len(self._beats) - 1
        for node in range(len(self._beats)):
            if not self._names[node] and store.check([f"node/{node}", f"beat/{node}"]):
                self._names[node] = store.get(f"node/{node}").decode()
        begun = [node for node, name in enumerate(self._names) if name]
        for node, beats in zip(begun, store.multi_get([f"beat/{node}" for node in begun]), strict=True):
            if int(beats) != self._beats[node] or node == self._own:
                self._beats[node], self._heard[node] = int(beats), self._answered


def lost_after(timeout: float | None) -> float:
    """After how many seconds of silence a node is lost, for all to have ended within the time-out."""
    return LOST_S if timeout is None else min(LOST_S, max(timeout - _END_S, timeout / 3))


def address_towards(host: str, port: int) -> str:
    """The address of this machine by which it reaches that one; empty where there is no way. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(where)
            return str(way.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address; empty where none has it, or another system."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", name.encode()[:15])
            if socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), 0x8915, asked)[20:24]) == address:  # SIOCGIFADDR
                return name
    return ""
