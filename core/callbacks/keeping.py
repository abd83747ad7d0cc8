"""The checkpoints of a `Checkpoint` callback: their names, what points at them, and the save behind the training."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..checkpoint.agree import agreed
from ..checkpoint.files import Place, Remote, as_path
from ..checkpoint.retention import Retention
from ..errors import CheckpointError, ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..checkpoint.background import Pending
    from ..trainer import Trainer

T = TypeVar("T")

POINTER = "last.json"
_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


@dataclass(frozen=True)
class Save:
    """Rank 0's decision to save: where, with which score (None: not ranked), and which values belong to the weights."""

    path: str
    score: float | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class Flying:
    """A save behind the training, and the boundary whose weights it holds."""

    pending: Pending
    save: Save
    boundary: int


class Keeping(Callback):
    """What is done with checkpoints; `Checkpoint` says when."""

    dirpath: str | None
    filename: str
    save_last: bool
    save_async: bool
    on_save_error: str
    _kept: Retention
    _where: str | None  # the directory that the kept paths lie in
    _saved: int  # the boundary of the newest complete checkpoint
    _dropped: list[str]  # not needed any more, and still there
    _flying: Flying | None
    _unpointed: Exception | None  # why `POINTER` does not name the newest checkpoint

    def _book(self, trainer: Trainer, save: Save, boundary: int) -> None:
        """A checkpoint is complete."""
        began = trainer.resumed_from  # stays, so that the same command can be given again
        self._dropped += [path for path in self._kept.add(save.path, save.score) if path != began]
        self._saved = boundary

    def _failed(self, trainer: Trainer, error: Exception) -> None:
        if not (isinstance(error, CheckpointError) and self.on_save_error == "warn"):
            raise error
        if trainer.is_global_zero:
            warnings.warn(f"training goes on without this checkpoint: {error}", stacklevel=2)

    # ------------------------------------------------------------------------------------------ saves in flight

    def _notice(self, trainer: Trainer) -> None:
        """A save behind the training has ended. No collective: the ranks see it at different updates, so a failure
        waits for `_land`."""
        flying = self._flying
        if flying is None or flying.pending.error is not None:
            return
        self._flying = None
        self._book(trainer, flying.save, flying.boundary)
        if self._unpointed is None:
            if trainer.is_global_zero:
                self._delete()
            self._dropped = []

    def _land(self, trainer: Trainer) -> None:
        """Wait for the save in flight; a failure is every rank's. All ranks call it."""
        if not self.save_async:
            return
        if self._flying is not None:
            self._flying.pending.join()
            self._flying.pending.told = True
        failure, unpointed = on_rank_0(trainer, self._outcome)
        if failure is None:
            self._notice(trainer)
        self._flying, self._unpointed = None, None
        for error in (failure, unpointed):
            if error is not None:
                self._failed(trainer, error)

    def _outcome(self) -> tuple[CheckpointError | None, CheckpointError | None]:
        """On rank 0: what went wrong since the last time, with the save and with its pointer."""
        failure = None if self._flying is None else self._flying.pending.error
        return (
            None if failure is None else CheckpointError(str(failure)),
            None if self._unpointed is None else CheckpointError(str(self._unpointed)),
        )

    def _land_alone(self, trainer: Trainer) -> None:
        """Wait for the save in flight, as training ends with an exception, which is the one to be seen."""
        if self._flying is None:
            return
        self._flying.pending.join()
        self._flying.pending.told = True
        for error in (self._flying.pending.error, self._unpointed):
            if error is not None:
                warnings.warn(f"a checkpoint could not be saved: {error}", stacklevel=2)
        self._notice(trainer)
        self._flying = None

    def _point_behind(self, path: str) -> None:
        """In the thread that writes, when the checkpoint is complete."""
        try:
            self._point(path)
        except Exception as error:  # of the pointer alone: `_land` raises it
            self._unpointed = error

    # ----------------------------------------------------------------------------------------------- on rank 0 alone

    def _open(self, trainer: Trainer) -> tuple[str, list[str], list[str], str]:
        """The directory, swept of dead saves; which of the kept checkpoints are not in it, and which of those that are
        not needed any more are; why it cannot be written."""
        from ..checkpoint import directory, places

        given = self.dirpath
        where = (trainer.stored(trainer.log_dir) / "checkpoints" if given is None else as_path(given)).absolute()
        barred = ""
        try:
            places.probe(where)
            if where.is_dir():
                directory.sweep(where)
        except OSError as error:
            barred = f"cannot write checkpoints into {str(where)!r}: {type(error).__name__}: {error}"
        known = {*self._kept.paths(), self._kept.last} - {""}
        # a path that a loaded state names may be deleted later, so it has to be a checkpoint that lies here
        gone = sorted(p for p in known if as_path(p).parent != where or not directory.complete(p))
        free = [path for path in self._dropped if path not in known and path != trainer.resumed_from]
        left = [path for path in free if as_path(path).parent == where and directory.complete(path)]
        return str(where), gone, left, barred

    def _tidy(self) -> None:
        """After a complete save: point at it, then delete what it replaced."""
        self._point(self._kept.last)
        self._delete()

    def _point(self, path: str) -> None:
        if not self.save_last:
            return
        file = as_path(path).parent / POINTER
        try:
            _replace(file, {"path": as_path(path).name})
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {path!r} is complete, but {str(file)!r} cannot name it and still names the one "
                f"before, which stays: {type(error).__name__}: {error}"
            ) from error

    def _delete(self) -> None:
        from ..checkpoint import directory

        for path in self._dropped:
            try:
                directory.delete(as_path(path))
            except FileNotFoundError:
                pass  # somebody else removed it
            except OSError as error:
                warnings.warn(
                    f"the checkpoint {path!r} is not needed any more and cannot be deleted: {error}", stacklevel=2
                )

    def _free_path(self, trainer: Trainer, metrics: dict[str, float], prefix: str = "") -> str:
        from ..checkpoint import places

        name = prefix + self.format_name(trainer.progress.epoch, trainer.progress.update, metrics)
        assert self._where is not None
        path, version = as_path(self._where) / name, 0
        while places.taken(path):
            version += 1
            path = path.with_name(f"{name}-v{version}")
        return str(path)

    def format_name(self, epoch: int, update: int, metrics: dict[str, float]) -> str:
        """The name that the template gives. A metric without a value that belongs to these weights becomes ``nan``."""
        known: dict[str, float] = {**metrics, "epoch": epoch, "update": update, "step": update}

        def fill(match: re.Match[str]) -> str:
            try:
                return format(known.get(match[1], math.nan), (match[2] or ":")[1:])
            except ValueError as error:
                raise ConfigurationError(f"Checkpoint(filename={self.filename!r}): {match[0]!r}: {error}") from error

        name = re.sub(r"[/\\:\0]", "_", _FIELD.sub(fill, self.filename))
        return name.lstrip(".") or "checkpoint"


def boundary_of(trainer: Trainer) -> int:
    return trainer.progress.update + trainer.progress.skipped


def on_rank_0(trainer: Trainer, function: Callable[[], T]) -> T:
    """Rank 0's answer or error on all ranks; a collective where there are several."""
    return agreed(function, rank=trainer.global_rank, world_size=trainer.world_size)


def _replace(path: Place, values: dict[str, Any]) -> None:
    """Replace a small JSON file as a whole."""
    if isinstance(path, Remote):
        with path.open("w") as file:
            json.dump(values, file)
        return
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
