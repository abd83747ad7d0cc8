"""Where a job begins: which checkpoint ``last`` and ``best`` mean, and which earlier run the same command goes on with.

Decided once, by one process: the one that starts the others, else rank 0. All ranks follow it.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import rundir
from .checkpoint import directory as checkpoints
from .checkpoint import newest
from .checkpoint.files import Place, as_path
from .checkpoint.newest import Found
from .errors import CheckpointError, ConfigurationError, TrivetError

if TYPE_CHECKING:
    from .job import Job
    from .launch.group import Group
    from .module import Module
    from .trainer import Trainer

WORDS = ("last", "best")


@dataclass
class Beginning:
    """``path``: the checkpoint to begin with, or None. ``continues``: an earlier run, in its directory. ``ended``: that
    has nothing left to do. ``directory``: the run's, as soon as it has one, where ``record`` is noted."""

    path: str | None = None
    continues: bool = False
    ended: bool = False
    record: rundir.Record | None = None
    directory: Path | None = None

    def note(self, trainer: Trainer, leaving: ExitStack, *, alone: bool = False) -> None:
        """Note in its directory which run this is; ``leaving`` says when it is over. By one process. ``alone``: raise
        where another process has the directory."""
        if self.directory is None:
            self.record = self.record or rundir.describe(trainer, trainer.module)
            where = _directory(trainer)
            self.record.versions = [None if one.earlier() is None else one.version for one in trainer.loggers]
            with rundir.written(where):
                pass
            if not leaving.enter_context(rundir.held(where)) and alone:
                raise _is_taken(where, rundir.of_holder(where))
            self.record.write(where)
            self.directory = where

    def end(self, trainer: Trainer) -> None:
        """Note that training has ended."""
        if self.directory is not None and self.record is not None:
            at = trainer.progress
            boundary = [at.update + at.skipped, at.epoch]
            replace(self.record, ended={"limits": _limits(trainer), "boundary": boundary}).write(self.directory)

    def checkpoint_directories(self, trainer: Trainer) -> list[Place]:
        return _saved_in(trainer, self.directory) if self.directory is not None else []

    def newest(self, trainer: Trainer) -> Found | None:
        """The newest complete checkpoint of this run, so far."""
        since = self.record.began if self.record is not None else 0.0
        return newest.newest(self.checkpoint_directories(trainer), since=since)


def begin(trainer: Trainer, job: Job, leaving: ExitStack) -> Beginning:
    """Decide where a job begins. Called by one process, before anybody asks for the directory of the run."""
    if job.stage != "fit":
        return Beginning(located(trainer, job.ckpt_path))
    now = rundir.describe(trainer, job.module)
    auto = job.resume == "auto"
    if auto and not trainer.checkpoint_callbacks:
        raise ConfigurationError(
            "resume='auto', but there is no Checkpoint callback, so there is nothing to go on from."
        )
    several = bool(trainer.loggers) and trainer.loggers[0].earlier() is not None  # else `held` decides
    with rundir.deciding(trainer.local_root_dir if auto and several else None):
        earlier = _earlier(trainer, now, auto) if auto or now.supervisor else None
        if earlier is None:
            beginning = Beginning(located(trainer, job.ckpt_path), record=now)
            if auto:
                _say(f"resume auto: no earlier run of this in {_root(trainer)}, begins afresh")
                beginning.note(trainer, leaving, alone=True)  # now: who asks next finds this run
            return beginning
    where, record = earlier
    if not leaving.enter_context(rundir.held(where)) and auto:
        raise _is_taken(where, record)
    now = replace(now, began=record.began, versions=record.versions)
    beginning = Beginning(job.ckpt_path, continues=True, record=now, directory=where)
    found = beginning.newest(trainer)
    if found is not None:
        beginning.path = str(found.path)
        told = {"limits": _limits(trainer), "boundary": list(found.boundary)}
        beginning.ended = record.ended == told
    if not beginning.ended:
        now.write(where)
    go_on(trainer, now.versions, found)
    _say(_told(beginning, found, where))
    return beginning


def _is_taken(where: Path, record: rundir.Record | None) -> ConfigurationError:
    by = "" if record is None else f" (that began as process {record.process} on {record.host or 'some machine'})"
    return ConfigurationError(
        f"resume='auto': the run in {str(where)!r} goes on in another process{by}. Wait for it, or give this one "
        "another default_root_dir."
    )


def go_on(trainer: Trainer, versions: list[int | str | None], found: Found | None) -> None:
    """Let the loggers go on where that checkpoint stands, in the versions of their run."""
    step = 0 if found is None else int(found.manifest["progress"].get("update", 0))
    for logger, version in zip(trainer.loggers, versions, strict=False):
        logger.go_on(version, step)


def follow(trainer: Trainer, job: Job, group: Group, leaving: ExitStack) -> Beginning:
    """`begin` on rank 0; what it decided on all ranks."""
    beginning, answer = Beginning(), ""
    if group.world.rank == 0:
        try:
            beginning = begin(trainer, job, leaving)
            answer = json.dumps([beginning.path, beginning.continues, beginning.ended])
        except TrivetError as error:
            answer = json.dumps({"error": str(error), "type": type(error).__name__})
            if group.world.world_size == 1:
                raise
    said = json.loads(group.exchange("resume", answer)[0])
    if isinstance(said, dict):
        kind = CheckpointError if said["type"] == "CheckpointError" else ConfigurationError
        raise kind(said["error"])
    beginning.path, beginning.continues, beginning.ended = said
    return beginning


def take(module: Module, path: str) -> None:
    """Give a module the weights of a checkpoint, outside of any run."""
    weights = checkpoints.read_weights(path)
    if set(weights) == set(module.state_dict()):
        module.load_state_dict(weights)
    else:
        _say(f"the module has other parameters than the checkpoint (configure_model makes them?); they are in {path}")


# ------------------------------------------------------------------------------------------------- where to look


def located(trainer: Trainer, given: str | None) -> str | None:
    """The checkpoint that ``ckpt_path`` means: a path, or ``last`` and ``best`` of the newest run that saved one."""
    if given not in WORDS:
        if given is not None:
            checkpoints.manifest(given)  # before processes are started that would not find it
        return given
    looked: list[Place] = []
    callback = trainer.checkpoint_callback
    for _, where in _runs(trainer):
        saved_in = [path for path in _saved_in(trainer, where) if path not in looked]
        looked += saved_in
        if given == "last":
            found = newest.newest(saved_in)
        else:
            monitor, mode = (callback.monitor, callback.mode) if callback is not None else (None, "min")
            found = newest.best(saved_in[0], monitor, mode) if saved_in else None
        if found is not None:
            return str(found.path)
    places = ", ".join(repr(str(path)) for path in looked[:3]) or repr(str(_root(trainer)))
    more = f" and {len(looked) - 3} more directories" if len(looked) > 3 else ""
    ranked = f", which monitors {callback.monitor!r}," if given == "best" and callback and callback.monitor else ""
    raise ConfigurationError(
        f"ckpt_path={given!r}: no Checkpoint callback of this Trainer{ranked} has saved one yet, and there is no "
        f"complete one in {places}{more}. Give the path of a checkpoint, or the default_root_dir of its run."
    )


def _runs(trainer: Trainer) -> Iterator[tuple[int | str | None, Path]]:
    """The directories of earlier runs, newest first, each with the version of the first logger. Creates none."""
    first = trainer.loggers[0] if trainer.loggers else None
    versions = None if first is None else first.earlier()
    if versions is None:
        yield None, _directory(trainer)
        return
    assert first is not None
    for version in reversed(versions):
        logger = copy.copy(first)
        logger.go_on(version, None)
        yield version, Path(logger.log_dir or trainer.local_root_dir)


def _directory(trainer: Trainer) -> Path:
    """The directory of this run. Asking may create it."""
    callback = trainer.checkpoint_callback
    if (first := trainer.loggers[0].log_dir if trainer.loggers else None) is not None:
        return Path(first)
    given = callback.dirpath if callback is not None else None
    found = trainer.local_root_dir if given is None else as_path(given)
    return found if isinstance(found, Path) else trainer.local_root_dir


def _root(trainer: Trainer) -> Path:
    runs = [where for _, where in _runs(trainer)]
    return runs[0].parent if len(runs) > 1 else trainer.local_root_dir


def _saved_in(trainer: Trainer, where: Path) -> list[Place]:
    """Where the Checkpoint callbacks of a run in this directory save."""
    given = [callback.dirpath for callback in trainer.checkpoint_callbacks] or [None]
    default = trainer.stored(where) / "checkpoints"
    return list(dict.fromkeys((default if path is None else as_path(path)).absolute() for path in given))


def _earlier(trainer: Trainer, now: rundir.Record, auto: bool) -> tuple[Path, rundir.Record] | None:
    other = ""
    for version, where in _runs(trainer):
        record = rundir.read(where)
        if record is None:
            continue
        if rundir.is_earlier_attempt(record, now) or (auto and record.job == now.job):
            return where, record
        other = other or f"{rundir.difference(record.job, now.job)} ({where})"
        if auto and version is None:
            raise ConfigurationError(
                f"resume='auto': {str(where)!r} holds the run of another job: {other}. Give another default_root_dir, "
                "or name the checkpoint to go on from with ckpt_path."
            )
    if auto and other:
        _say(f"resume auto: the newest run is of another job: {other}")
    return None


def _limits(trainer: Trainer) -> dict[str, Any]:
    limits = asdict(trainer.limits)
    return {name: limits[name] for name in ("max_epochs", "max_steps", "max_seconds", "min_epochs", "min_steps")}


def _told(beginning: Beginning, found: Found | None, where: Path) -> str:
    if found is None:
        return f"no complete checkpoint yet in {where}: its run begins again"
    at = found.manifest["progress"]
    stands = f"{at.get('epoch')} epochs, {at.get('update')} updates"
    if beginning.ended:
        ended = f"the run in {where} has ended ({stands}; checkpoint: {found.path})"
        return f"{ended}. With a higher max_epochs or max_steps it goes on"
    return f"going on from {found.path} ({stands})"


def _say(text: str) -> None:
    print(f"trivet: {text}", file=sys.stderr, flush=True)
