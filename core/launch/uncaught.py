"""What a rank prints of an exception that nobody caught, where each rank is a program of its own: the first failure's
traceback once, and one line of each rank that ends because of it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import RankFailed

_WAIT_S, _SAY_S = 3.0, 1.0


class Uncaught:
    """Takes the place of ``sys.excepthook`` from the moment on that a run of several ranks has failed."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self.before = sys.excepthook

    def install(self) -> None:
        if isinstance(self.before, Uncaught):
            self.before = self.before.before
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not follows(error, self.rank):
            self.before(kind, error, trace)
            _within(_SAY_S, lambda: self.store.set("said", ""))
            return
        assert isinstance(error, RankFailed)
        if error.traceback:  # that rank's own process shows it
            _within(_WAIT_S, self._until_said)
        print(f"trivet: rank {self.rank} ended, since {error}", file=sys.stderr, flush=True)

    def _until_said(self) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not self.store.check(["said"]) and time.monotonic() < deadline:
            time.sleep(0.05)


def _within(seconds: float, ask: Callable[[], Any]) -> None:
    """Ask a store that may be gone, or may never answer, since a machine is gone."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            ask()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def follows(error: BaseException, rank: int) -> bool:
    """Whether a rank ends with this error because of another one."""
    return isinstance(error, RankFailed) and error.rank != rank
