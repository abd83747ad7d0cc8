"""How a rank's failure travels: a record in the private directory of the launch, or in the store of the run, and back
into an exception."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import cloudpickle  # type: ignore[import-untyped]

from ..errors import STOPS, RankFailed
from ..processes import is_running

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PLACE, STACK = "place", "stack"
"""What a worker's watchdog leaves in that directory: where the rank is, and after a crash the stacks."""

UNWRITTEN = 74
"""The exit code of a worker that had no room for its record (EX_IOERR)."""


class RemoteTraceback(Exception):
    """The traceback of another process as text, shown as the cause of what is raised here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].rstrip()}\n"""'


@dataclass(frozen=True)
class Failure:
    """What a rank wrote about its end.

    ``interrupt``: it was asked to stop and did. ``follows``: it ended only because another rank had failed, or, with
    ``interrupt``, before it had begun. ``exception``: the pickled original, where it pickles.
    """

    rank: int
    type_name: str
    message: str
    traceback: str = ""
    time: float = 0.0
    interrupt: bool = False
    follows: bool = False
    exception: bytes | None = None

    def stopped(self) -> BaseException:
        """Of an interrupt: what the rank raised."""
        return pickle.loads(self.exception) if self.exception is not None else KeyboardInterrupt()

    def error(self) -> RankFailed:
        """The failure as an exception, with the original as ``__cause__`` and the worker's traceback as its cause."""
        error = RankFailed(self.rank, self.type_name, self.message, self.traceback)
        error.__cause__ = RemoteTraceback(self.traceback) if self.traceback else None
        if self.exception is not None:
            try:
                original = pickle.loads(self.exception)
            except Exception:  # pickled there, but does not load here: the text has to do
                return error
            original.__cause__, error.__cause__ = error.__cause__, original
        return error


def describe(exception: BaseException, rank: int) -> Failure:
    """Turn an exception that was caught in this process into a record."""
    frames = exception.__traceback__
    try:
        pickled = cloudpickle.dumps(exception)
        pickle.loads(pickled)  # exceptions with an unusual constructor pickle, but do not load
    except Exception:
        pickled = None
    cut = _from_user_code(frames)
    return Failure(
        rank,
        type(exception).__name__,
        str(exception),
        "".join(traceback.format_exception(type(exception), exception, cut)),
        time.time(),
        interrupt=isinstance(exception, STOPS),
        follows=isinstance(exception, RankFailed) and exception.rank != rank,
        exception=pickled,
    )


def without_words(rank: int, code: int, when: float, *, follows: bool, directory: Path | None = None) -> Failure:
    """The record of a process that left none. ``code`` is its exit code, negative that of a signal.

    ``directory`` is where its watchdog noted where it was, and C code the stacks when it crashed.
    """
    last = stack = ""
    if directory is not None:
        last, crash = last_seen(directory / f"{PLACE}-{rank}", when), directory / f"{STACK}-{rank}"
        stack = crash.read_text(errors="replace").strip() if crash.exists() else ""
    if code == UNWRITTEN:
        text = (
            f"it could not leave its exception in {str(directory)!r} (is the disk full?); its stderr has the traceback"
        )
        return Failure(rank, f"exit code {code}", text, time=when, follows=follows)
    if code >= 0:
        text = "the process ended without an exception (os._exit, or a library that ends the process)"
        return Failure(rank, f"exit code {code}", text + last, stack, time=when, follows=follows)
    name = signal.Signals(-code).name
    text = f"the process was killed by signal {-code}"
    if name == "SIGKILL" and not follows:
        text += "; where nobody sent it, the system had run out of memory"
    if name == "SIGABRT" and "distributed_c10d.py" in stack:
        text += (
            ", in a collective (see its stack): gloo ends a process that gets another size than it expects. All ranks "
            "have to call the same collective there, with tensors of the same size"
        )
    return Failure(rank, name, text + last, stack, time=when, follows=follows)


def _from_user_code(frames: TracebackType | None) -> TracebackType | None:
    """Cut the frames of the worker and the loop above the user's first one; keep all where there is no such frame."""
    first = frames
    while first is not None and first.tb_frame.f_globals.get("__name__", "").split(".")[0] in ("trivet", "torch"):
        first = first.tb_next
    return first or frames


def ask_to_stop(directory: Path, number: int) -> None:
    """Leave word that a signal of this number asked the run to stop; the first one counts."""
    with contextlib.suppress(FileExistsError):
        os.symlink(str(number), directory / "stop")  # whole or not at all, and made on a full disk, too


def asked_to_stop(directory: Path) -> int:
    """Which signal asked the run to stop, 0 if none did."""
    try:
        return int(os.readlink(directory / "stop"))
    except FileNotFoundError:
        return 0


def post(store: Store, failure: Failure | RankFailed) -> None:
    """Tell all ranks through their store, unless another failure was told before. Raises RuntimeError without a store,
    as the next three do."""
    record = [failure.rank, failure.type_name, failure.message, failure.traceback]
    store.compare_set("failed", "", json.dumps(record))


def posted(store: Store) -> RankFailed | None:
    """The first failure that was told."""
    return RankFailed(*json.loads(store.get("failed"))) if store.check(["failed"]) else None


def post_stop(store: Store, number: int) -> None:
    """Tell all ranks that a signal of this number asked the run to stop; the first one counts."""
    store.compare_set("stop/asked", "", str(number))


def posted_stop(store: Store) -> int:
    """Which signal asked the run to stop, 0 if none did."""
    return int(store.get("stop/asked")) if store.check(["stop/asked"]) else 0


def write(directory: Path, failure: Failure) -> None:
    """Leave the record, once per rank: its first word about its own end counts. Readers see all of it or nothing."""
    path = directory / f"failure-{failure.rank}"
    if path.exists():
        return
    temporary = directory / f".failure-{failure.rank}-{os.getpid()}"
    temporary.write_bytes(pickle.dumps(asdict(failure)))
    temporary.replace(path)


def read(directory: Path) -> list[Failure]:
    """All records so far: first those that failed by themselves, in the order of time."""
    found = [Failure(**pickle.loads(path.read_bytes())) for path in directory.glob("failure-*")]
    return sorted(found, key=lambda failure: (failure.follows, failure.time))


def process_ended(directory: Path, rank: int) -> bool:
    """Whether this rank's process ended without having finished its work (it may have left a record)."""
    try:
        pid = int((directory / f"pid-{rank}").read_text())
    except (FileNotFoundError, ValueError):
        return False
    return not is_running(pid) and not (directory / f"done-{rank}").exists()


def of_peers(directory: Path, rank: int, world_size: int) -> RankFailed | None:
    """Which other rank failed first, as far as this directory and the process table tell. Cheap; no communication."""
    ended = [other for other in range(world_size) if other != rank and process_ended(directory, other)]
    for failure in read(directory):
        if failure.rank != rank and (failure.follows or not failure.interrupt):
            return failure.error()
    for other in _without_record(directory, ended):
        return early_end(other)
    return None


def early_end(rank: int, last: str = "") -> RankFailed:
    """What the others know of a rank whose process left no word, and where it was seen ``last``."""
    text = f"its process ended without an exception (killed, os._exit, or a crash){last}"
    return RankFailed(rank, "an early end", text)


def last_seen(notes: Path, when: float) -> str:
    """Where the watchdog of a rank noted that it was, as the end of a sentence; "" where it noted nothing."""
    try:
        then, _, place = notes.read_text(errors="replace").partition(" ")
    except OSError:
        return ""
    return f". {max(when - float(then), 0.0):.1f} s before, {place}" if place else ""


def _without_record(directory: Path, ended: list[int]) -> Iterator[int]:
    return (rank for rank in ended if not (directory / f"failure-{rank}").exists())
