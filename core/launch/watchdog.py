"""Watchdog: a rank's thread that notices when the rank no longer gets on, and finds with the others who is to blame.

Nothing is noted in a step for it: it looks at the run's own counters, and at the stacks of those that stand still.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ..torch_compat import collectives_begun
from . import failures, place, verdict, watch
from .place import Place
from .verdict import Verdict
from .world import World

QUIET_S = 5.0
"""After how long a rank that waits in a collective shows the others where. Before that it looks if one asks."""

_PERIOD_S = 0.5
_LOOKS = 4  # how often in a row a mismatch has to be seen
_ANSWER_S = 2.5
_MUTE_S = 4.0  # how much later than this thread the one in C ends a process whose interpreter is held up
_STOP_S = 3.0


class Watchdog:
    """Watches the thread that makes it.

    ``pulse`` gives what changes while the run gets on, first what was trained, and ``progress`` the same in words.
    ``timeout``: after how many seconds without a change the run ends, None for never. Where ranks wait in collectives
    that can never meet, it ends without one. ``store`` is a client of its own, None for a single process. ``notes`` is
    a file where it leaves where the rank is, and ``forget`` removes it.
    """

    def __init__(
        self,
        world: World,
        store: Store | None,
        *,
        pulse: Callable[[], tuple[Any, ...]],
        progress: Callable[[], str],
        timeout: float | None = None,
        notes: int = -1,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.world, self.store, self.timeout = world, store if world.world_size > 1 else None, timeout
        self.log: Path | None = None  # where stacks of all threads are written to
        self.off = False  # whether the run has failed already
        self._pulse, self._progress, self._forget = pulse, progress, forget
        self._ident = threading.get_ident()
        self._seen: Any = None
        self._first: Any = None  # the pulse before the run got on for the first time
        self._again = 0.0  # before when not to ask again
        self._since = time.monotonic()
        self._shown: tuple[Any, ...] | None = None  # what the others see of this rank
        self._looks = 0
        self._dump: IO[str] | None = None
        self._notes, self._crash = notes, -1
        self._faults = False  # whether it enabled faulthandler
        guard = watch.current()
        if guard is not None and guard.directory is not None:  # a worker of Trivet's: it leaves where it was
            self._notes, self._crash = (
                os.open(guard.directory / f"{what}-{world.rank}", os.O_RDWR | os.O_CREAT, 0o600)
                for what in (failures.PLACE, failures.STACK)
            )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trivet-watchdog", daemon=True)

    def start(self) -> Watchdog:
        if self.timeout is not None or self.store is not None:
            if self._crash >= 0 or not faulthandler.is_enabled():
                self._faults = not faulthandler.is_enabled()
                faulthandler.enable(max(self._crash, 2))  # a crash in C++ shows its stack, on stderr under torchrun
            self._thread.start()
        return self

    def stop(self) -> None:
        """Wait until it no longer looks: a thread inside the store's C++ code while Python ends aborts the process."""
        self._stopped.set()
        notes, self._notes = self._notes, -1
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._disarm()
        if self._crash < 0:
            if self._faults:
                faulthandler.disable()
        elif notes >= 0 and not self._thread.is_alive():  # that of crashes is needed until the process ends
            os.close(notes)
        self._faults = False

    def explain(self, exception: BaseException) -> Verdict | None:
        """Whether an error of a collective comes from ranks that called different ones. For the watched thread."""
        here = place.of_traceback(exception.__traceback__, self.world.rank, self._progress())
        if self.store is None or not (here.plain or here.waits == "backward"):
            return None
        with contextlib.suppress(RuntimeError):  # the store went with the process that held it
            found = self._gather(here)
            self.store.delete_key("watchdog/asked")
            others = [one for one in found.values() if one.rank != here.rank and one.calls and one.waits]
            odd = next((one for one in others if one.waits != here.waits or one.at != here.at), None)
            return None if odd is None else verdict.mismatch(*sorted((here, odd), key=lambda one: one.rank))
        return None

    # ------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._stopped.wait(_PERIOD_S):
                if self.off:
                    self._disarm()
                    continue
                try:
                    if self._look():
                        return
                except RuntimeError:  # the store went with the process that held it, which others notice
                    if self.timeout is None:
                        return
        finally:
            self._disarm()  # or the thread in C would end a rank that is well, since this one no longer defers it

    def _look(self) -> bool:
        """Whether the run was ended."""
        at, now = self._pulse(), time.monotonic()
        pulse: tuple[Any, ...] = (at, collectives_begun())
        self._first = at[0] if self._first is None else self._first
        if at[0] == self._first:  # imports, data and building take as long as they get on
            pulse = (*pulse, place.fingerprint(self._ident))
        if pulse != self._seen:
            self._seen, self._since = pulse, now
            self._hide()
        self._arm()
        if (notes := self._notes) >= 0:
            self._note(notes)
        still = now - self._since
        if self.timeout is not None and still >= self.timeout and now >= self._again:
            return self._decide()
        if self.store is None:
            return False
        if self.store.check(["watchdog/asked"]):
            number = self.store.get("watchdog/asked").decode()
            self._answer(number, self._here())
            return self._follow()
        return still >= QUIET_S and self._compare()

    def _note(self, notes: int) -> None:
        """Leave where this rank is, for those that look after it when it has been killed."""
        text = f"{time.time()} {self._here(with_stack=False)}".encode()
        with contextlib.suppress(OSError):
            os.ftruncate(notes, os.pwrite(notes, text, 0))

    def _here(self, *, with_stack: bool = True) -> Place:
        still = time.monotonic() - self._since
        return place.of_thread(self._ident, self.world.rank, self._progress(), still, with_stack=with_stack)

    def _arm(self) -> None:
        """Let C code end this process where Python's, and with it this thread, no longer runs."""
        if self.timeout is None or self._stopped.is_set():
            return
        if self._dump is None:
            append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            try:
                file = os.dup(2) if self.log is None else os.open(self.log, append)
            except OSError:  # a full disk, no stderr: it ends the process all the same
                file = os.open(os.devnull, os.O_WRONLY)
            self._dump = os.fdopen(file, "w")
        faulthandler.dump_traceback_later(self.timeout + _MUTE_S, exit=True, file=self._dump)

    def _disarm(self) -> None:
        if self._dump is not None:
            faulthandler.cancel_dump_traceback_later()
            self._dump.close()
            self._dump = None

    # ------------------------------------------------------------------------------------------- with the others

    def _compare(self) -> bool:
        """Show where this rank waits and, on rank 0, look whether all that wait can ever meet."""
        assert self.store is not None
        here = self._here()
        if not here.waits:
            self._hide()
            return False
        if here.guarded and verdict.certain({here.rank: here}, self.world.world_size):
            return self._decide()
        shown = (here.waits, here.calls, here.at)
        if shown != self._shown:
            self.store.set(f"watchdog/quiet/{self.world.rank}", _dumps(here))
            self._shown = shown
        keys = [f"watchdog/quiet/{rank}" for rank in range(self.world.world_size)]
        if self.world.rank or not self.store.check(keys):
            self._looks = 0
            return False
        places = {one.rank: one for one in map(_loads, self.store.multi_get(keys))}
        self._looks = self._looks + 1 if verdict.certain(places, self.world.world_size) else 0
        return self._looks >= _LOOKS and self._decide()

    def _hide(self) -> None:
        if self._shown is not None and self.store is not None:
            self.store.delete_key(f"watchdog/quiet/{self.world.rank}")
        self._shown, self._looks = None, 0

    def _answer(self, number: str, here: Place) -> None:
        assert self.store is not None
        self.store.set(f"watchdog/place/{number}/{self.world.rank}", _dumps(here))
        if self.log is not None:
            with contextlib.suppress(OSError), open(self.log, "a") as file:  # a full disk: then without the stacks
                print(f"trivet: {here}. All threads:", file=file, flush=True)
                faulthandler.dump_traceback(file)

    def _gather(self, here: Place) -> dict[int, Place]:
        """The places of all ranks that answer in time. Ranks that ask at the same time share the answers."""
        if self.store is None:
            return {here.rank: here}
        number = str(self.store.add("watchdog/rounds", 1))
        number = self.store.compare_set("watchdog/asked", "", number).decode()
        self._answer(number, here)
        keys = [f"watchdog/place/{number}/{rank}" for rank in range(self.world.world_size)]
        deadline = time.monotonic() + _ANSWER_S
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        there = [key for key in keys if self.store.check([key])]
        return {one.rank: one for one in map(_loads, self.store.multi_get(there))}

    def _decide(self) -> bool:
        """Find out who is to blame and end the run, unless that rank still gets on and the others wait for it."""
        guard = watch.current()
        if self.off or (guard is not None and guard.look() is not None):  # a rank has failed, and takes its time to end
            return False
        size, seconds = self.world.world_size, self.timeout or QUIET_S
        places = self._gather(self._here())
        found = verdict.of(places, size, seconds)
        late = seconds - places[found.rank].still if found.kind == verdict.HANG and found.rank in places else 0.0
        if late > 2 * _PERIOD_S:
            self._again = time.monotonic() + late
            if self.store is not None:
                self.store.delete_key("watchdog/asked")
            return False
        text = json.dumps([asdict(found), found.rank if found.rank in places else min(places)])
        if self.store is not None:
            text = self.store.compare_set("watchdog/verdict", "", text).decode()
        self._end(text)
        return True

    def _follow(self) -> bool:
        """Wait for the verdict of the rank that asked; it may have asked for another reason, or be gone."""
        assert self.store is not None
        deadline = time.monotonic() + 2 * _ANSWER_S
        while time.monotonic() < deadline and not self._stopped.wait(0.1):
            if self.store.check(["watchdog/verdict"]):
                self._end(self.store.get("watchdog/verdict").decode())
                return True
            if not self.store.check(["watchdog/asked"]):
                return False
        self.store.delete_key("watchdog/asked")
        return False

    def _end(self, text: str) -> None:
        """Say what was found, on one rank, and end the process of the rank that is to blame; others learn of it."""
        fields, speaker = json.loads(text)
        found = Verdict(**fields)
        failure = failures.Failure(found.rank, found.kind, found.text, _traceback(found), time.time())
        guard = watch.current()
        with contextlib.suppress(OSError):  # a full disk: the run ends all the same
            if guard is not None and guard.directory is not None:
                if self.world.rank in (found.rank, speaker):
                    failures.write(guard.directory, failure)
            elif self.world.rank == speaker:
                # the terminal itself: what this rank prints otherwise may go into a file
                print(f"{failure.traceback}{failure.error()}", file=sys.__stderr__, flush=True)
        if self.store is not None and self.world.rank == speaker:
            failures.post(self.store, failure)
            self.store.set("said", "")
        if self.world.rank == found.rank:
            self._forget()
            os._exit(1)


def _traceback(found: Verdict) -> str:
    return f"Stack of rank {found.rank} (most recent call last):\n{found.stack}" if found.stack else ""


def _dumps(one: Place) -> str:
    return json.dumps(asdict(one))


def _loads(data: bytes) -> Place:
    return Place(**json.loads(data))
