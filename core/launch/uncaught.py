"""What a rank prints of an exception that nobody caught, where each rank is a program of its own: the first failure's
traceback once, and one line of each rank that ends because of it."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any

from ..errors import RankFailed

_WAIT_S = 3.0


class Uncaught:
    """Takes the place of ``sys.excepthook`` from the moment on that a run of several ranks has failed."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store, rank
        self._before = sys.excepthook

    def install(self) -> None:
        if isinstance(self._before, Uncaught):
            self._before = self._before._before
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not follows(error, self.rank):
            self._before(kind, error, trace)
            with contextlib.suppress(RuntimeError):  # the store went with the process that held it
                self.store.set("said", "")
            return
        assert isinstance(error, RankFailed)
        deadline = time.monotonic() + (_WAIT_S if error.traceback else 0.0)  # that rank's own process shows it
        with contextlib.suppress(RuntimeError):
            while not self.store.check(["said"]) and time.monotonic() < deadline:
                time.sleep(0.05)
        print(f"trivet: rank {self.rank} ended, since {error}", file=sys.stderr, flush=True)


def follows(error: BaseException, rank: int) -> bool:
    """Whether a rank ends with this error because of another one."""
    return isinstance(error, RankFailed) and error.rank != rank
