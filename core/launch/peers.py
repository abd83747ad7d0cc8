"""Peers: which other rank failed first, where no launcher of Trivet's looks after the processes, as under torchrun."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from ..errors import RankFailed
from ..processes import end_stopped, is_running
from . import failures


class Peers:
    """What the ranks of a run say of themselves in their store, and the process table of this machine of the others.

    ``store`` is a client of its own, since it is asked from a thread.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank = store, rank
        self._unknown = [other for other in range(world_size) if other != rank]
        self._here: dict[int, tuple[int, Path]] = {}  # ranks on this machine: their processes, and what they note
        self.notes, path = -1, os.devnull
        with contextlib.suppress(OSError):  # nowhere to write to: then it leaves no notes
            self.notes, path = tempfile.mkstemp(prefix="trivet-place-")  # where this rank is, for when it is killed
        self._remove = {Path(path)} if self.notes >= 0 else set()
        store.set(f"process/{rank}", f"{os.getpid()} {_processes_of()} {path}")

    def look(self) -> RankFailed | None:
        """The first failure that was posted, else one whose process is gone; None if it is this rank's own."""
        try:
            self._find()
            ended = (rank for rank, (process, _) in self._here.items() if not is_running(process))
            gone = next((rank for rank in ended if not self.store.check([f"done/{rank}"])), -1)
            told = failures.posted(self.store)  # asked after that: it may have told, and ended since
            first = gone if told is None else told.rank
            if first in self._here and str(self._here[first][1]) != os.devnull:
                self._remove.add(self._here[first][1])  # it may never come to remove them itself
            if told is not None or gone >= 0:
                for process, _ in self._here.values():
                    end_stopped(process)  # torch's agent would wait 30 s for it
            if told is not None:
                return told if told.rank != self.rank else None
            if gone >= 0:
                return failures.early_end(gone, failures.last_seen(self._here[gone][1], time.time()))
        except RuntimeError:  # the store went with the process that held it
            pass
        return None

    def _find(self) -> None:
        for rank in list(self._unknown):
            if self.store.check([f"process/{rank}"]):
                self._unknown.remove(rank)
                process, host, notes = self.store.get(f"process/{rank}").decode().split(" ", 2)
                if host == _processes_of():
                    self._here[rank] = int(process), Path(notes)

    def done(self) -> None:
        """This rank has ended as it should."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"done/{self.rank}", "")

    def close(self) -> None:
        """This rank leaves."""
        if self.notes >= 0:
            os.close(self.notes)
        self.forget()

    def forget(self) -> None:
        """Remove what this rank noted, since it has told what happened, and the notes of those that are gone."""
        for path in self._remove:
            with contextlib.suppress(OSError):
                path.unlink()

    def asked(self) -> int:
        """Which signal asked a rank to stop, 0 if none did."""
        with contextlib.suppress(RuntimeError):
            return failures.posted_stop(self.store)
        return 0

    def ask(self, number: int) -> None:
        with contextlib.suppress(RuntimeError):
            failures.post_stop(self.store, number)


def _processes_of() -> str:
    """Names the table of processes that ids are of: containers of the same host name have one each."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()
