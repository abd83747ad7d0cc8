"""Watch: the thread in a worker that ends it when its launcher is gone, or soon after another rank has failed, and
that passes a request to stop on between ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RankFailed

if TYPE_CHECKING:
    from .signals import Stop

GRACE_S = 5.0
"""How long a rank may go on after another has failed: time for hooks, not for waiting on a dead peer."""

_PERIOD_S = 0.5
_STOP_S = 3.0


class Watch:
    """Looks for failed peers and for the launching process, from a daemon thread.

    A rank that is stuck in a collective or in other C++ code runs no Python signal handler, so a thread has to end it.
    ``look`` answers which peer failed first. ``last_words`` is called before the process is ended for a peer's failure.
    ``asked`` answers which signal asked a rank, or the launcher, to stop (0: none did), and ``ask`` says so to all.
    """

    def __init__(
        self,
        look: Callable[[], RankFailed | None],
        *,
        last_words: Callable[[RankFailed], None],
        asked: Callable[[], int],
        ask: Callable[[int], None],
        parent: int | None = None,
        directory: Path | None = None,
    ) -> None:
        self.look, self.last_words = look, last_words
        self.asked, self._ask = asked, ask
        self.stop_request: Stop | None = None  # of the fit that runs in this process
        self.parent, self.directory = parent, directory
        self.handled = False  # whether the main thread knows already, so that nothing may be raised into it any more
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trivet-watch", daemon=True)

    def start(self) -> Watch:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Wait until it no longer looks: a thread inside the store's C++ code while Python ends aborts the process."""
        self._stopped.set()
        self._thread.join(_STOP_S)

    def raise_once(self, failure: RankFailed) -> None:
        """Raise in the main thread, from a signal handler, unless it is dealing with a failure already."""
        if not self.handled:
            self.handled = True
            raise failure

    def _run(self) -> None:
        deadline: float | None = None
        while not self._stopped.wait(_PERIOD_S):
            if self.parent is not None and os.getppid() != self.parent:
                self._abandoned()
            with contextlib.suppress(OSError):  # a full disk, no free descriptor: the next look may find it better
                deadline = self._once(deadline)

    def _once(self, deadline: float | None) -> float | None:
        """Look, and answer when this process is to be ended, if it is."""
        failure = self.look()
        if failure is None:
            self._pass_on()
            return deadline
        deadline = deadline or time.monotonic() + GRACE_S
        if time.monotonic() >= deadline:
            try:
                self.last_words(failure)
            finally:  # said or not
                os._exit(1)
        return deadline

    def _pass_on(self) -> None:
        """A signal may have reached this rank alone, or any other: each tells, and each is told."""
        if (stop := self.stop_request) is None:
            return
        number = self.asked()
        if stop.requested and not number:
            self._ask(stop.requested)
        elif number and not stop.requested:
            stop.request(number)

    def _abandoned(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
        if os.getpgrp() == os.getpid():  # our own group: data-loader processes end with us
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)


_current: Watch | None = None


def current() -> Watch | None:
    """The watch of this process: set in workers of Trivet's launchers, and by `Group` under torchrun."""
    return _current


def set_current(watch: Watch | None) -> None:
    global _current
    _current = watch
