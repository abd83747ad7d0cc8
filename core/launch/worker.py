"""The program that each worker process of Trivet's launchers runs: ``python -m trivet.launch.worker DIRECTORY PARENT``.

It imports torch only after the environment is set, since OpenMP reads its variables while it is loaded.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ..errors import STOPS, RankFailed
from ..imports import uncollected
from . import failures, profiles, watch
from .torchrun import from_variables
from .world import LAUNCH_DIR, World


def main(directory: Path, parent: int) -> int:
    """Run the handed-over function on this rank and return the exit code. What went wrong is left as a record.

    An interrupt ends with code 0: the elastic agent ends the other ranks as soon as one exits with another code, and
    they may still be writing their checkpoint.
    """
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{str(directory)!r} is not a private directory of this user; nothing is loaded from it")
    settings = json.loads((directory / "settings.json").read_text())
    for name, value in settings["environ"].items():
        os.environ.setdefault(name, value)
    os.environ[LAUNCH_DIR] = str(directory)
    world = from_variables(os.environ, source=settings["source"])
    profiles.bind(os.environ, world.local_rank, world.local_world_size)
    guard = _guard(directory, parent, world)
    (directory / f"pid-{world.rank}").write_text(str(os.getpid()))
    try:
        if failures.asked_to_stop(directory):  # asked for before this process could be reached by a signal
            early = failures.describe(KeyboardInterrupt("stopped before it started"), world.rank)
            failures.write(directory, replace(early, follows=True))
            return 1  # the others may wait for this rank already
        _run(settings, directory, world)
    except BaseException as exception:
        guard.handled = True
        return _leave_word(directory, world.rank, exception)
    guard.handled = True
    (directory / f"done-{world.rank}").touch()
    return 0


def _leave_word(directory: Path, rank: int, exception: BaseException) -> int:
    """Leave the record of what went wrong; answers the exit code."""
    stops = isinstance(exception, STOPS)
    try:
        failures.write(directory, failures.describe(exception, rank))
    except OSError as error:  # a full disk
        with contextlib.suppress(OSError):
            if stops:  # an empty file takes no room; without a word this rank would be taken for one that died
                (directory / f"done-{rank}").touch()
            else:
                print(f"trivet: rank {rank} cannot leave its exception: {error}", file=sys.stderr)
                traceback.print_exception(exception)
        return 0 if stops else failures.UNWRITTEN
    return 0 if stops else 1


def _guard(directory: Path, parent: int, world: World) -> watch.Watch:
    """Install the signal handlers and start the watch."""

    def last_words(failure: RankFailed) -> None:
        text = f"ended {watch.GRACE_S:g} s after {failure}"
        record = failures.Failure(world.rank, "RankFailed", text, time=time.time(), follows=True)
        failures.write(directory, record)

    def terminate(number: int, frame: FrameType | None) -> None:
        failure = guard.look()
        if failure is None:  # not the agent ending us after a peer's failure: somebody asks us to stop
            raise KeyboardInterrupt
        guard.raise_once(failure)

    guard = watch.Watch(
        lambda: failures.of_peers(directory, world.rank, world.world_size),
        last_words=last_words,
        asked=lambda: failures.asked_to_stop(directory),
        ask=lambda number: failures.ask_to_stop(directory, number),
        parent=parent,
        directory=directory,
    )
    watch.set_current(guard)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored, inherited from a background job
    signal.signal(signal.SIGTERM, terminate)
    return guard.start()


def _run(settings: dict[str, Any], directory: Path, world: World) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the terminal's or notebook's input belongs to the parent
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = settings["path"]
    sys.argv[:] = settings["argv"]
    os.chdir(settings["cwd"])
    module, _, name = settings["function"].partition(":")
    with uncollected():
        function = getattr(importlib.import_module(module), name)
    payload = pickle.loads((directory / "payload").read_bytes())
    function(payload, world, Path(settings["out_dir"]))


def leave(code: int) -> NoReturn:
    """End this process as multiprocessing ends its children: without Python's finalization.

    While Python takes its modules apart, a C++ thread of torch that is still there can abort a process whose work is
    done and reported. What may be expected to happen first, does: threads and child processes end, streams are flushed.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    for child in multiprocessing.active_children():  # loader workers, which would otherwise outlive us by seconds
        child.terminate()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # closed by the user's code, or by the reader
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    # imported under its own name, so that its frames are not taken for those of the user's __main__
    from . import worker

    leave(worker.main(Path(sys.argv[1]), int(sys.argv[2])))
