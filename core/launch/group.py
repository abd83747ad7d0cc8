"""Group: the live side of a World. A store for messages, and the default process group for collectives."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ..errors import STOPS, CollectiveError, LaunchError, RankFailed
from . import alone, failures, watch
from .across import Across
from .nodes import LOST
from .peers import Peers
from .uncaught import Uncaught
from .watchdog import Watchdog
from .world import World

_CLOSE_S = 3.0
_POLL_S = 0.5
_COLLECTIVE_S = 1800.0
_WORDS_S = 30.0
if hasattr(os, "register_at_fork"):
    # A loader's worker must not free what it inherited as garbage: freeing a process group waits for its threads, which
    # a forked process has not, and the rank then waits for the worker.
    os.register_at_fork(after_in_child=gc.freeze)
_opened = itertools.count()  # each fit of a process has keys of its own; all ranks open their groups in the same order


class Group:
    """The processes of a run, connected. Made by `Group.open` in each of them."""

    def __init__(
        self,
        world: World,
        store: Store | None,
        device: torch.device | None,
        side: Store | None = None,
    ) -> None:
        self.world, self.store, self.device = world, store, device
        self.side = side  # a client of its own for threads, since the main one is held while it waits
        self.watchdog: Watchdog | None = None
        self._connected = False
        self._guard: watch.Watch | None = None
        self._peers: Peers | None = None
        self._told = False  # whether this rank has said that it failed
        self._terminate: Any = None  # the handler of SIGTERM before this rank failed
        self._across: Across | None = None
        self.synchronize: Callable[[], None] = lambda: None  # waits until this rank's device has done all it was asked
        if side is not None and watch.current() is None:  # in workers of Trivet's launchers there is one already
            self._peers = Peers(side, world.rank, world.world_size)
            if world.num_nodes > 1:
                self._across = Across(self._peers, side.clone(), world, _endpoint(world))  # type: ignore[attr-defined]
            self._guard = _watch(self._across or self._peers, world, forget=self._peers.forget)
        self._calls: Counter[str] = Counter()

    @classmethod
    def open(
        cls,
        world: World,
        backend: str | None,
        device: torch.device | None = None,
        timeout: float | None = None,
    ) -> Group:
        """Connect this process with the others; all ranks call it. A single process without launcher gets no store.

        ``backend`` names that of torch's default process group (``"gloo"``, ``"nccl"``), None makes none. ``timeout``
        is that of `watch_over`: each collective is bounded late enough for the watchdogs to say first what they found.
        """
        if world.source == "single":
            return cls(world, None, device)
        if dist.is_initialized():
            raise LaunchError(
                "torch's default process group exists already, and Trivet has to make it. Call "
                "torch.distributed.destroy_process_group() before, and do not initialise it yourself."
            )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"trivet/{restart}/{next(_opened)}"
        base = _base_store(world.rank, world.world_size, world.address)
        side = PrefixStore(prefix, base.clone())  # type: ignore[attr-defined]
        group = cls(world, PrefixStore(prefix, base), device, side)
        if backend is not None:
            try:
                timeout_s = _COLLECTIVE_S if timeout is None else timeout + _WORDS_S
                group.connect(backend, PrefixStore(f"{prefix}/torch", base), timeout_s)
            except BaseException as error:
                group.fail(error)
                group.close(abort=True)
                raise
        return group

    def connect(self, backend: str, store: Store, timeout_s: float) -> None:
        """Make torch's default process group."""
        dist.init_process_group(
            backend,
            store=store,
            rank=self.world.rank,
            world_size=self.world.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=self.device if self.device is not None and self.device.type == "cuda" else None,
        )
        self._connected = True

    def exchange(self, key: str, value: str, timeout_s: float = 300.0) -> list[str]:
        """Post a string and return those of all ranks by rank. All ranks make the same calls in the same order.

        Goes through the store: no collective, no device. Raises LaunchError naming the ranks that did not post in
        time, or RankFailed as soon as one is known to have failed.
        """
        alone.refuse(f"exchange({key!r})")
        if self.store is None:
            return [value]
        call = f"exchange/{key}/{self._calls[key]}"
        self._calls[key] += 1
        keys = [f"{call}/{rank}" for rank in range(self.world.world_size)]
        self.store.set(keys[self.world.rank], value)
        started = time.monotonic()
        while not self.store.check(keys):  # not store.wait, whose time-outs torch reports on stderr, from every rank
            if (failure := self._peer_failure()) is not None:
                raise failure
            waited = time.monotonic() - started
            if waited > timeout_s:
                missing = [rank for rank, name in enumerate(keys) if not self.store.check([name])]
                raise LaunchError(
                    f"waited {timeout_s:g} s for {key!r} from every rank; nothing came from rank "
                    f"{', '.join(map(str, missing))}. They are stuck, have ended, or took another path in the code."
                )
            time.sleep(min(waited / 10, _POLL_S))
        return [text.decode() for text in self.store.multi_get(keys)]

    def barrier(self) -> None:
        """Wait for all ranks, through the store. All ranks call it."""
        self.exchange("barrier", "")

    def fail(self, exception: BaseException) -> None:
        """Tell the others that this rank failed, once; called by the rank itself, before its hooks for exceptions."""
        guard = self._handled()
        failure = failures.describe(exception, self.world.rank)
        if guard is not None and guard.directory is not None:
            with contextlib.suppress(OSError):  # a full disk: the worker tries again, and says so, when it ends
                failures.write(guard.directory, failure)
        if self.watchdog is not None:
            self.watchdog.off = True
        self._told = not failure.interrupt
        if self._peers is not None and not failure.interrupt:
            Uncaught(self.side, self.world.rank).install()
            if isinstance(exception, SystemExit):  # Python shows nothing of it; the terminal itself, as in Watchdog
                with contextlib.suppress(OSError):  # nobody reads it
                    print(failure.traceback, end="", file=sys.__stderr__, flush=True)
            self._peers.forget()
        if self.store is not None and not failure.interrupt and not failure.follows:
            with contextlib.suppress(RuntimeError):  # the store went with the process that held it
                failures.post(self.store, failure)

    def settle(self, exception: BaseException) -> BaseException:
        """Find out which rank failed first, tell the others, and return what to raise. For a rank that failed."""
        if self.world.world_size == 1 or isinstance(exception, STOPS):
            return exception
        # a broken connection is a consequence: the news of its cause may take a moment
        own = isinstance(exception, torch.OutOfMemoryError)  # a RuntimeError, too
        consequence = isinstance(exception, (RuntimeError, RankFailed)) and not own
        peer = self.failure(wait_s=2.0 if consequence else 0.0)
        exception = peer or (self.explain(exception) if consequence else None) or exception
        self.fail(exception)
        return exception

    def failure(self, wait_s: float = 0.0) -> RankFailed | None:
        """Which rank failed first, if it is another one; waits up to ``wait_s`` for the news. No collective."""
        self._handled()
        deadline = time.monotonic() + wait_s
        while True:
            failure = self._peer_failure()
            if failure is not None or time.monotonic() >= deadline:
                return failure
            time.sleep(0.05)

    def _handled(self) -> watch.Watch | None:
        """From here on no signal handler may raise into the caller's except block."""
        if (guard := watch.current()) is not None:
            guard.handled = True
        main = threading.current_thread() is threading.main_thread()
        if self._peers is not None and self._terminate is None and main:
            # torch's agent sends SIGTERM as soon as a rank has ended, and the others have hooks and a word to say
            self._terminate = signal.signal(signal.SIGTERM, _end_soon)
        return guard

    def watch_over(
        self, pulse: Callable[[], tuple[Any, ...]], progress: Callable[[], str], timeout: float | None
    ) -> None:
        """Notice from a thread when this one no longer gets on; see `Watchdog`."""
        if self._across is not None:
            self._across.beats.timeout = timeout
        left: dict[str, Any] = {} if self._peers is None else {"notes": self._peers.notes, "forget": self._peers.forget}
        self.watchdog = Watchdog(self.world, self.side, pulse=pulse, progress=progress, timeout=timeout, **left).start()

    def explain(self, error: BaseException) -> CollectiveError | None:
        """What to raise instead of an error of a collective where the ranks called different ones."""
        found = self.watchdog.explain(error) if self.watchdog is not None else None
        if found is None:
            return None
        made = CollectiveError(found.text).with_traceback(error.__traceback__)
        made.__cause__ = error  # what failed, and where
        return made

    def close(self, abort: bool = False) -> None:
        """Leave the group. ``abort`` where a peer may be gone: gives up what is under way and waits for nobody."""
        if self._guard is not None:  # first, since it would end a rank that takes its time with what follows
            self._guard.stop()
            watch.set_current(None)
            self._guard = None
        if self.watchdog is not None:
            self.watchdog.stop()
        if self._across is not None:
            self._across.stop()
        if self._peers is not None:
            if not self._told:  # also where all ranks stop on request: nobody is to end those that are still saving
                self._peers.done()
            self._peers.close()
            self._peers = None
        if self._terminate is not None:
            signal.signal(signal.SIGTERM, self._terminate)
            self._terminate = None
        if not self._connected:
            return
        self._connected = False
        if abort:
            thread = threading.Thread(target=_abort, name="trivet-abort", daemon=True)
            thread.start()
            thread.join(_CLOSE_S)
        else:
            dist.destroy_process_group()

    def _peer_failure(self) -> RankFailed | None:
        guard = watch.current()
        told = None
        with contextlib.suppress(RuntimeError):  # the store went with the process that held it
            told = failures.posted(self.store) if self.store is not None else None
        if told is not None and told.rank != self.world.rank:
            return told
        return None if guard is None else guard.look()


@functools.cache
def _base_store(rank: int, world_size: int, address: str) -> Store:
    """The store at the world's address, or where the launcher's variables say. Kept for the life of the process: rank 0
    may be serving it."""
    store: Store
    store, _, _ = next(rendezvous(f"tcp://{address}" if address else "env://", rank, world_size))
    return store


def _endpoint(world: World) -> tuple[str, int]:
    """Where rank 0 is to be reached."""
    host, _, port = (world.address or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}").rpartition(":")
    return host.strip("[]"), int(port)


def _end_soon(number: int, frame: object) -> None:
    """End this process, which has failed, unless its hooks for that are done by then."""
    timer = threading.Timer(watch.GRACE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _watch(peers: Peers | Across, world: World, *, forget: Callable[[], None]) -> watch.Watch:
    """Watch from a thread what becomes of the other ranks."""

    def last_words(failure: RankFailed) -> None:
        forget()
        # one of a node that lost rank 0 says it on the terminal too
        alone = failure.type_name == LOST and world.local_rank == 0 and world.rank != 0
        for stream in {sys.stderr, sys.__stderr__ or sys.stderr} if alone else {sys.stderr}:
            print(f"trivet: rank {world.rank} ends {watch.GRACE_S:g} s after {failure}", file=stream, flush=True)

    guard = watch.Watch(peers.look, last_words=last_words, asked=peers.asked, ask=peers.ask)
    watch.set_current(guard)
    return guard.start()


def _abort() -> None:
    with contextlib.suppress(Exception):
        dist.group.WORLD.abort()  # type: ignore[union-attr]
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
