"""Output: what the ranks of a run print. Rank 0 speaks on the terminal, every rank writes a file of its own, and a
warning is shown once, with the number of ranks that had it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, TextIO, cast

from torch.distributed import Store  # type: ignore[attr-defined]

from .world import World

FOLDER = "logs"
"""Of the files, in the directory of the run."""

_GATHER_S = 2.0  # how long a warning waits for the same of other ranks
_PERIOD_S = 0.5
_MOVES = re.compile(r"\r(?!\n)|\x1b\[[\d;]*[A-HJ]")  # the cursor; K alone clears what a coloured line leaves
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")  # colours, titles: ECMA-48
_MOST = 200  # warnings that a rank tells of


def log_file(directory: Path, rank: int) -> Path:
    return directory / FOLDER / f"rank_{rank}.log"


class Output:
    """Stands between a rank's prints, Python's logging and warnings, and the terminal, until `close`.

    ``directory`` is that of the run; None where the run writes none: then prints go where they went before. ``store``
    is a client of its own.
    """

    def __init__(self, world: World, store: Store | None, directory: Path | None) -> None:
        self.world, self.store = world, store
        self.path = None if directory is None else log_file(directory, world.rank)
        self._file = io.StringIO() if self.path is None else _open(self.path, world)
        self._warned = _Warnings(world, store)
        self._process = os.getpid()
        self._streams = sys.stdout, sys.stderr
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._show_warning = warnings.showwarning
        warnings.showwarning = self._warn
        if self.path is not None:
            self._copies = tuple(_Copy(stream, self._file, world.rank == 0) for stream in self._streams)
            sys.stdout, sys.stderr = (cast(TextIO, copy) for copy in self._copies)
            for handler in logging.getLogger().handlers:
                for stream, copy in zip(self._streams, self._copies, strict=True):
                    if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                        self._handlers.append((handler, handler.setStream(cast(TextIO, copy))))
        self._warned.start()

    def note(self, error: BaseException) -> None:
        """Write an error into this rank's file."""
        with contextlib.suppress(OSError):  # a full disk, as below: neither ends a run nor hides how it ended
            self._file.write("".join(traceback.format_exception(error)))
            self._file.flush()

    def close(self, *, failed: bool) -> None:
        """Leave all as it was. Rank 0 shows the warnings that have not been shown yet, of a good end those of all."""
        warnings.showwarning = self._show_warning
        self._warned.stop(failed=failed)
        for handler, stream in self._handlers:
            handler.setStream(stream)
        if self.path is not None:
            sys.stdout, sys.stderr = self._streams
            for copy in self._copies:
                copy.end()
        with contextlib.suppress(OSError):
            self._file.close()

    def _warn(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        if os.getpid() != self._process:  # a loader's, forked: the store's connection and the locks are the rank's
            self._show_warning(message, category, filename, lineno, file, line)
            return
        # the handler of before decides whether it is printed, or recorded by a test; what it prints goes into the file,
        # where that of rank 0 gets it below
        into = file or (self._file if self.world.rank else io.StringIO())
        self._show_warning(message, category, filename, lineno, cast(TextIO, into), line)
        if file is None:
            self._warned.tell(warnings.formatwarning(message, category, filename, lineno, line))


class _Copy:
    """A stream that writes into a file, and on the terminal too where ``shown``."""

    def __init__(self, stream: TextIO, file: IO[str], shown: bool) -> None:
        self._stream, self._file, self._shown = stream, file, shown

    def write(self, text: str) -> int:
        if self._shown:
            self._stream.write(text)
        if not self._file.closed and not _MOVES.search(text):  # else a bar's
            with contextlib.suppress(OSError):
                self._file.write(_ESCAPE.sub("", text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.flush()

    def isatty(self) -> bool:
        return self._shown and self._stream.isatty()

    def end(self) -> None:
        """From now on only the terminal's, also of those that kept it."""
        self._shown = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Warnings:
    """Gathers on rank 0 which ranks had which warnings. Ranks that have none say nothing."""

    def __init__(self, world: World, store: Store | None) -> None:
        self.rank, self.world_size = world.rank, world.world_size
        self.store = store if world.world_size > 1 else None
        self._lock = threading.Lock()
        self._pending: dict[str, tuple[float, set[int]]] = {}
        self._shown: set[str] = set()
        self._told = self._read = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trivet-warnings", daemon=True)

    def start(self) -> None:
        if self.rank == 0 and self.store is not None:
            self._thread.start()

    def tell(self, text: str) -> None:
        """This rank had a warning."""
        if self.rank == 0:
            self._take(text, 0)
            if self.store is None:
                self._show(late=True)
        elif self.store is not None and self._told < _MOST:
            self._told += 1
            with contextlib.suppress(RuntimeError):  # the store went with the process that held it
                number = self.store.add("warnings/number", 1)
                self.store.set(f"warnings/{number}", json.dumps([self.rank, text]))
                self.store.add("warnings/there", 1)

    def stop(self, *, failed: bool) -> None:
        self._stopped.set()
        with contextlib.suppress(RuntimeError):
            if self.store is None or failed:  # the store may be gone, or never answer again
                pass
            elif self.rank:
                self.store.add("warnings/closed", 1)
            else:
                self._thread.join(_GATHER_S)
                limit = time.monotonic() + _GATHER_S
                while self.store.add("warnings/closed", 0) < self.world_size - 1 and time.monotonic() < limit:
                    time.sleep(0.02)
                self._fetch()
        self._show(late=True)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):
            while not self._stopped.wait(_PERIOD_S):
                self._fetch()
                self._show(late=False)

    def _fetch(self) -> None:
        assert self.store is not None
        if self.store.add("warnings/there", 0) == self._read:
            return
        while self.store.check([f"warnings/{self._read + 1}"]):
            self._read += 1
            rank, text = json.loads(self.store.get(f"warnings/{self._read}"))
            self._take(text, rank)

    def _take(self, text: str, rank: int) -> None:
        with self._lock:
            if text not in self._shown:
                self._pending.setdefault(text, (time.monotonic(), set()))[1].add(rank)

    def _show(self, *, late: bool) -> None:
        """Print those that all ranks had, and those that waited long enough or, with ``late``, all."""
        with self._lock:
            now = time.monotonic()
            ready = [
                (text, ranks)
                for text, (since, ranks) in self._pending.items()
                if late or len(ranks) == self.world_size or now - since >= _GATHER_S
            ]
            for text, _ in ready:
                del self._pending[text]
                self._shown.add(text)
        for text, ranks in ready:
            first, _, rest = text.rstrip().partition("\n")
            lines = [f"{first}{self._by(ranks)}", *filter(None, [rest])]
            with contextlib.suppress(OSError):  # nobody reads it any more
                print("\n".join(lines), file=sys.stderr, flush=True)

    def _by(self, ranks: set[int]) -> str:
        if self.world_size == 1:
            return ""
        which = "" if len(ranks) == self.world_size else f": {', '.join(map(str, sorted(ranks)))}"
        return f" (on {len(ranks)} of {self.world_size} ranks{which})"


def supervised(directory: Path, text: str) -> None:
    """Add to what the supervisor of a run says of its attempts."""
    path = directory / FOLDER / "supervisor.log"
    with contextlib.suppress(OSError):  # a full disk: the next attempt is made all the same
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            print(f"---- {_now()}: process {os.getpid()}\n{text}", file=file)


def _open(path: Path, world: World) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), "w", buffering=1)
    print(f"---- {_now()}: rank {world.rank} of {world.world_size}, process {os.getpid()}", file=file)
    return file


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
