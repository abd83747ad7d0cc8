"""Stop: Ctrl-C, SIGTERM and SLURM's warning as a request that all ranks follow after the same update."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import Terminated
from . import watch
from .world import World

if TYPE_CHECKING:
    from .failures import Failure
    from .group import Group

_SAME_REQUEST_S = 0.5
"""Schedulers signal every process, and launchers forward: signals to a worker this close together are one request."""

WARNING = getattr(signal, "SIGUSR1", 0)
"""SLURM's ``--signal=USR1@90``: an end is to come. It is never the second signal, nor is the SIGTERM after it."""


def asking(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The signals that ask a fit to end: SIGINT, SIGTERM and, in a job step of SLURM's, SIGUSR1, which
    ``sbatch --signal=USR1@90`` sends some time before the end."""
    in_slurm = environ.get("SLURM_JOB_ID") and environ.get("SLURM_PROCID")
    return (signal.SIGINT, signal.SIGTERM, *((WARNING,) if WARNING and in_slurm else ()))


def stopped_by(number: int, update: int = 0) -> BaseException:
    """What is raised when a run ended because of this signal."""
    return KeyboardInterrupt() if number in (0, signal.SIGINT) else Terminated(number, update)


def judge(found: list[Failure], asked: int) -> None:
    """Raise what a launch has to raise for these records and the signal that asked its process to stop, if any."""
    found.sort(key=lambda failure: (failure.follows, failure.time))
    if found and found[0].interrupt:
        stopped = found[0].stopped()
        # a function that knows nothing of signals raised KeyboardInterrupt for any of them
        raise stopped_by(asked) if isinstance(stopped, KeyboardInterrupt) else stopped
    if found:
        raise found[0].error()
    if asked:  # too late for the workers, which were done
        raise stopped_by(asked)


class Asking:
    """A context in the process that launched: the first signal asks the workers to stop, another one ends them at once.

    Which signals these are says `asking`. Off the main thread nothing is installed.
    """

    def __init__(self, ask: Callable[[int], None] | None = None, end: Callable[[], None] | None = None) -> None:
        self.number = 0  # of the first signal
        self.again = self._hard = False  # whether another one came
        self._ask, self._end = ask, end
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Asking:
        if threading.current_thread() is threading.main_thread():
            for number in asking(os.environ):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._previous.items():
            signal.signal(number, before)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            if self._ask is not None:
                self._ask(number)
        elif self._hard:
            self.again = True
            if self._end is not None:
                self._end()
        self._hard |= number != WARNING


class Stop:
    """A context around fit, in every process: the first signal sets ``requested``, the second ends at once.

    Which signals these are says `asking`. A signal that reaches one rank is told to the others by their `Watch`. At
    once means: what the signal did before, in a single process (KeyboardInterrupt for SIGINT); exit code 128 and its
    number in a worker. Off the main thread, and with ``active=False``, nothing is installed.
    """

    def __init__(self, world: World, *, active: bool = True) -> None:
        self.requested = 0  # number of the signal
        self.answered = False  # whether the run ended because of it
        self._worker, self._active = world.source != "single", active
        self._hard = self._forwarded = False
        self._since = 0.0
        self._announced: set[str] = set()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if self._active and threading.current_thread() is threading.main_thread():
            for number in asking(os.environ):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        if self._active and (guard := watch.current()) is not None:
            guard.stop_request = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active and (guard := watch.current()) is not None:
            guard.stop_request = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def request(self, number: int) -> None:
        """Ask to stop, because of a signal that this process got, or another one."""
        self._since = time.monotonic()
        self.requested = number

    def reason(self, update: int) -> BaseException:
        """What to raise where all ranks have agreed."""
        self.answered = True
        return stopped_by(self.requested, update)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        guard = watch.current()
        if number == signal.SIGTERM and guard is not None and (failure := guard.look()) is not None:
            guard.raise_once(failure)  # the agent ends this rank because a peer failed: nobody asked to stop
            return
        local = guard is not None and guard.directory is not None
        told = guard.asked() if guard is not None and local and number == signal.SIGINT else 0
        if told and not self._forwarded:
            self._forwarded = self._hard = True  # by the launcher, which kills where it is asked again
            self.request(self.requested or told)
            return
        hard = number != WARNING
        again, self._hard = hard and self._hard, self._hard or hard
        if not again:
            self.request(self.requested or number)
        elif not self._worker:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
        elif time.monotonic() - self._since > _SAME_REQUEST_S:
            os._exit(128 + number)

    def agree(self, update: int, group: Group) -> bool:
        """Whether all ranks stop now. Called at every update boundary while ``requested`` is set, and only then.

        ``update`` grows by one at each boundary, alike on all ranks. Every rank first says that it has the request;
        when all have, rank 0 names the next boundary, before it joins the collectives of the update that leads there.
        No rank completes that update without rank 0, so each finds the name when it arrives. Uses the store, never a
        collective; waits for the device, since a host that runs ahead could pass the boundary. Afterwards the request
        is rank 0's on all ranks, since what follows differs by signal.
        """
        return self._agree("stop", update, group)

    def agree_within(self, evaluation: int, batch: int, group: Group) -> bool:
        """Whether this rank breaks off a validation now, the how manieth says ``evaluation``. Asked before each of its
        batches while ``requested`` is set.

        As `agree`, so that ranks whose steps meet in collectives of the user's end before the same batch. Those that
        don't meet may end apart; see `leave_together`.
        """
        return self._agree(f"stop/{evaluation}", batch, group)

    def leave_together(self, evaluation: int, broken: bool, group: Group) -> bool:
        """Whether any rank broke the validation off, and so all do. All ranks call it, when each has no batch left or
        broke off. Goes through the store."""
        if group.store is not None and group.world.world_size > 1:
            self._announce(f"stop/{evaluation}", group)  # a rank that has no batch left agrees to any
            numbers = [int(text) for text in group.exchange("validated", str(self.requested if broken else 0), 1800.0)]
            number = next(filter(None, numbers), 0)
            broken, self.requested = bool(number), number or self.requested
        return broken

    def _agree(self, name: str, number: int, group: Group) -> bool:
        if group.store is None or group.world.world_size == 1:
            return True
        group.synchronize()
        store = group.store
        self._announce(name, group)
        if store.check([f"{name}/at"]):
            at, asked = map(int, store.get(f"{name}/at").split())
            if number >= at:
                self.requested = asked
            return number >= at
        if group.world.rank == 0 and store.add(f"{name}/seen", 0) == group.world.world_size:
            store.set(f"{name}/at", f"{number + 1} {self.requested}")
        return False

    def _announce(self, name: str, group: Group) -> None:
        if name not in self._announced and group.store is not None:
            self._announced.add(name)
            group.store.add(f"{name}/seen", 1)
