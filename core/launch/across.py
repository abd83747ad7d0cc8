"""Across: `Peers` on several nodes, asked from one more thread, since the store of a lost node answers never."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ..errors import RankFailed
from . import failures
from .nodes import Beats, Repeating, address_towards
from .peers import Peers
from .world import World

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class Across:
    """What `Peers` say, and which node is lost. ``store`` is a client that nobody else uses."""

    def __init__(self, peers: Peers, store: Store, world: World, main: tuple[str, int]) -> None:
        self._asked = self._to_ask = 0
        self._peers, self._store = peers, store
        self._failed: RankFailed | None = None
        name = address_towards(*main) or socket.gethostname()
        self.beats = Beats(
            store, world.node_rank, world.num_nodes, world.local_world_size, tells=world.rank == 0, name=name
        )
        self._thread = Repeating(self._round, "trivet-across")
        self._thread.start()

    def look(self) -> RankFailed | None:
        """As that of `Peers`; talks to nobody."""
        return self._failed or self.beats.lost()

    def asked(self) -> int:
        """As that of `Peers`."""
        return self._asked

    def ask(self, number: int) -> None:
        self._to_ask = number
        self._thread.wake.set()

    def stop(self) -> None:
        self._thread.stop(wait=self.beats.lost() is None)

    def _round(self, last: bool) -> None:
        self.beats.beat()
        if self.beats.tells and (lost := self.beats.lost()) is not None:
            failures.post(self._store, lost)
        self._failed = self._failed or self._peers.look()
        if self._to_ask:
            self._peers.ask(self._to_ask)
            self._to_ask = 0
        self._asked = self._asked or self._peers.asked()
