"""Stop: Ctrl-C and SIGTERM as a request that all ranks follow after the same update."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from . import watch
from .group import Group
from .world import World

_SAME_REQUEST_S = 0.5
"""Schedulers signal every process, and launchers forward: signals to a worker this close together are one request."""


class Stop:
    """A context around fit, in every process: the first signal sets ``requested``, the second ends at once.

    SIGINT counts everywhere, SIGTERM in launched processes only. The second signal raises KeyboardInterrupt in a
    single process and ends a worker with exit code 130. Off the main thread nothing is installed.
    """

    def __init__(self, world: World) -> None:
        self.requested = False
        self._worker = world.source != "single"
        self._since = 0.0
        self._announced = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM) if self._worker else (signal.SIGINT,):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        guard = watch.current()
        if number == signal.SIGTERM and guard is not None and (failure := guard.look()) is not None:
            guard.raise_once(failure)  # the agent ends this rank because a peer failed: nobody asked to stop
        elif not self.requested:
            self.requested, self._since = True, time.monotonic()
        elif not self._worker:
            raise KeyboardInterrupt
        elif time.monotonic() - self._since > _SAME_REQUEST_S:
            os._exit(130)

    def agree(self, update: int, group: Group) -> bool:
        """Whether all ranks stop now. Called at every update boundary while ``requested`` is set, and only then.

        ``update`` grows by one at each boundary, alike on all ranks. Every rank first says that it has the request;
        when all have, rank 0 names the next boundary, before it joins the collectives of the update that leads there.
        No rank completes that update without rank 0, so each finds the name when it arrives. Uses the store, never a
        collective; waits for the device, since a host that runs ahead could pass the boundary.
        """
        if group.store is None or group.world.world_size == 1:
            return True
        group.synchronize()
        store = group.store
        if not self._announced:
            self._announced = True
            store.add("stop/seen", 1)
        if store.check(["stop/at"]):
            return update >= int(store.get("stop/at"))
        if group.world.rank == 0 and store.add("stop/seen", 0) == group.world.world_size:
            store.set("stop/at", str(update + 1))
        return False
