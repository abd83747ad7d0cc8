"""Nodes: what the machines of a run tell one another through its store, and which of them is lost."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import RankFailed
from . import failures, watch

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

LOST = "NodeLost"
"""The ``type_name`` of a `RankFailed` for a machine that nothing is heard of."""

LOST_S = 60.0
"""How long nothing is heard of a machine until it counts as lost, where no shorter time-out was asked for."""

MISSED_S = 4 * 0.5
"""After how long silence explains a connection that broke."""

_END_S = watch.GRACE_S + 5.0  # how long after that the ranks of the others may still need to end
_PERIOD_S = 0.5
_STOP_S = 3.0


class Beats:
    """Signs of life of the nodes of a run. `beat` talks to the store, which answers never where the connection is cut:
    for a thread of its own. `lost` talks to nobody.

    ``devices`` counts the processes of a node; ``name`` is what the others call this one. One process of node 0, where
    the store is, ``tells`` of nodes that are lost; the others look after their connection to it. ``timeout``: within
    how many seconds the run is to end after that.
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
        self.tells, self.timeout = tells, timeout
        self.gone = ""  # why the store can no longer be asked
        self._store, self._own, self._devices, self._name = store, node_rank, devices, name
        self._begun = False
        self._answered = time.monotonic()
        self._beats = [0] * num_nodes
        self._names = [""] * num_nodes
        self._heard = [self._answered] * num_nodes

    def beat(self) -> None:
        store = self._store
        if not self._begun:
            store.set(f"node/{self._own}", self._name or socket.gethostname())
            self._begun = True
        store.add(f"beat/{self._own}", 1)
        self._answered = time.monotonic()
        if not self._names[0] and store.check(["node/0"]):
            self._names[0] = store.get("node/0").decode()
        if not self.tells:
            return
        for node, name in enumerate(self._names):
            if not self._beats[node] and store.check([f"node/{node}", f"beat/{node}"]):
                self._names[node] = name or store.get(f"node/{node}").decode()
                self._beats[node] = -1
        begun = [node for node, beats in enumerate(self._beats) if beats]
        for node, text in zip(begun, store.multi_get([f"beat/{node}" for node in begun]), strict=True):
            if int(text) != self._beats[node]:
                self._beats[node], self._heard[node] = int(text), self._answered

    def lost(self, *, suspected: bool = False) -> RankFailed | None:
        """The first node that nothing was heard of for too long; where one is ``suspected``, a few beats are enough."""
        limit = MISSED_S if suspected else lost_after(self.timeout)
        if not self.tells:
            silent = time.monotonic() - self._answered
            why = self.gone or (f"its store has not answered for {silent:.0f} s" if silent > limit else "")
            return self._lost(0, why) if why else None
        for node, heard in enumerate(self._heard):
            silent = time.monotonic() - heard
            if self._beats[node] and silent > limit:  # a node that has yet to begin may take its time
                return self._lost(node, f"nothing was heard of it for {silent:.0f} s")
        return None

    def _lost(self, node: int, why: str) -> RankFailed:
        first = node * self._devices
        ranks = f"rank {first}" if self._devices == 1 else f"ranks {first} to {first + self._devices - 1}"
        where = f" at {self._names[node]}" if self._names[node] else ""
        text = f"lost node {node} of {len(self._beats)}{where} ({ranks}): {why}. The machine, its network or its "
        return RankFailed(first, LOST, text + "processes are gone.")


class News:
    """Between launchers, one on each node: the first failure, a request to stop, and which node is lost."""

    def __init__(self, store: Store, beats: Beats, num_nodes: int) -> None:
        self.failed: RankFailed | None = None  # the first that was posted, of any rank
        self.asked = 0  # which signal asked the run to stop
        self.alone = False  # whether all other nodes have left; known on node 0
        self.lost = beats.lost
        self._store, self._beats, self._num_nodes = store, beats, num_nodes
        self._to_post: list[RankFailed] = []
        self._to_ask = 0
        self._thread = Repeating(self._round, "trivet-news")

    def start(self) -> News:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Say what is left to say."""
        self._thread.stop(wait=self._beats.tells or self.lost() is None)

    def post(self, failure: RankFailed) -> None:
        """Tell the others that a rank of this node failed; of all that are told, the first one counts."""
        self._to_post.append(failure)
        self._thread.wake.set()

    def ask(self, number: int) -> None:
        """Ask all ranks to stop, because of this signal."""
        self._to_ask = number
        self._thread.wake.set()

    def _round(self, last: bool) -> None:
        store = self._store
        try:
            while self._to_post:
                failures.post(store, self._to_post.pop(0))
            if self._to_ask:
                failures.post_stop(store, self._to_ask)
                self._to_ask = 0
            self.failed = self.failed or failures.posted(store)
            self.asked = self.asked or failures.posted_stop(store)
            self._beats.beat()
            self.alone = store.add("left", int(last)) >= self._num_nodes - 1
        except RuntimeError:
            self._beats.gone = "the connection to its store has ended"
            raise


class Repeating:
    """A thread that does the same every half second, until that raises RuntimeError, as a store does whose process is
    gone; once more when it is told to stop."""

    def __init__(self, round: Callable[[bool], None], name: str) -> None:
        self._round = round
        self._stopped, self.wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start

    def stop(self, *, wait: bool = True) -> None:
        """Wait until it has stopped: a thread in the store's C++ code while Python ends aborts the process. Not where
        the store will never answer."""
        self._stopped.set()
        self.wake.set()
        self._thread.join(_STOP_S if wait else 0.0)

    def _run(self) -> None:
        last = False
        with contextlib.suppress(RuntimeError):
            while not last:
                self.wake.clear()
                last = self._stopped.is_set()
                self._round(last)
                if not last:
                    self.wake.wait(_PERIOD_S)


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
    if sys.platform != "linux":
        return ""
    import fcntl

    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", name.encode()[:15])
            if socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), 0x8915, asked)[20:24]) == address:  # SIOCGIFADDR
                return name
    return ""
