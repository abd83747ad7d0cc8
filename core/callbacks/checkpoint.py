"""Checkpoint: when to save, under which name, and which checkpoints to keep."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ..checkpoint.agree import agreed
from ..checkpoint.retention import Retention
from ..errors import STOPS, CheckpointError, ConfigurationError, Terminated
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer

T = TypeVar("T")

POINTER = "last.json"
_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


@dataclass(frozen=True)
class _Save:
    """Rank 0's decision to save: where, with which score (None: not ranked), and which values belong to the weights."""

    path: str
    score: float | None
    metrics: dict[str, float]


class Checkpoint(Callback):
    """Saves checkpoints during training and keeps the best, the newest or all of them.

    A save that is due where a validation is due too waits for it, so that the monitored value of a checkpoint belongs
    to exactly its weights. A checkpoint to whose weights no validation belongs is not ranked: it is kept until the next
    one is complete. Rank 0 decides, all ranks save. A checkpoint is deleted only after the next is complete, and only
    if this run (or the one that it resumes, in the same directory) wrote it.

    Args:
        dirpath: where checkpoints are written; ``checkpoints`` in the trainer's ``log_dir`` by default.
        filename: a template with ``{epoch}`` (epochs completed), ``{update}`` or ``{step}`` (updates applied) and names
            of metrics, each with an optional format: ``"{update:06d}-{val/loss:.3f}"``. Slashes become underscores. An
            existing name gets a suffix ``-v1``, ``-v2``, ...
        monitor: the metric that ranks checkpoints. Without it the newest ``save_top_k`` are kept. One that validation
            or the epoch's end did not bring is an error.
        mode: ``"min"`` or ``"max"``. A value that is NaN is never among the best.
        save_top_k: how many to keep; -1 keeps all, 0 none.
        save_last: always save, keep the newest too, and name it in the file ``last.json`` of ``dirpath``: a small file
            that is replaced as a whole, since links are not to be had on every file system.
        every_n_updates: save whenever the number of applied updates is a multiple of it.
        every_n_epochs: save at the end of each n-th epoch; 1 where no other interval is given, 0 for never.
        every_n_minutes: save after so many minutes by the clock of rank 0. On several processes the ranks
            agree about it only every ``log_every_n_steps`` updates, since agreeing is a collective.
        save_on_train_end: save when training ends, unless that was decided for these weights already.
        save_on_exception: save when an exception, such as Ctrl-C, ends training between two updates. On several
            processes only a stop that all of them agreed on (Ctrl-C) counts. Such a checkpoint is never deleted.
            Whatever it says, the trainer's first Checkpoint saves where a signal such as SIGTERM ends training; that
            checkpoint stays until the next one is complete.
        on_save_error: ``"raise"`` ends training when a checkpoint cannot be written, ``"warn"`` goes on. Either way the
            attributes below still name the last complete one.

    Attributes:
        best_model_path: path of the best checkpoint, without ``monitor`` of the newest; ``""`` before the first.
        best_model_score: its monitored value.
        best_k_models: path -> monitored value of the ranked checkpoints that are kept.
        last_model_path: path of the newest complete checkpoint.
        current_score: monitored value of the newest ranked save.
    """

    saves: ClassVar[bool] = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        filename: str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_updates: int | None = None,
        every_n_epochs: int | None = None,
        every_n_minutes: float | None = None,
        save_on_train_end: bool = True,
        save_on_exception: bool = False,
        on_save_error: str = "raise",
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"Checkpoint(mode={mode!r}): expected 'min' or 'max'")
        if on_save_error not in ("raise", "warn"):
            raise ConfigurationError(f"Checkpoint(on_save_error={on_save_error!r}): expected 'raise' or 'warn'")
        if type(save_top_k) is not int or save_top_k < -1:
            raise ConfigurationError(f"Checkpoint(save_top_k={save_top_k!r}): expected -1 (all), 0 (none) or a number")
        intervals = {"updates": every_n_updates, "epochs": every_n_epochs, "minutes": every_n_minutes}
        for unit, value in intervals.items():
            if value is not None and (value < 0 or (unit != "minutes" and type(value) is not int)):
                raise ConfigurationError(f"Checkpoint(every_n_{unit}={value!r}): expected a positive number")
        self.dirpath = str(dirpath) if dirpath is not None else None
        self.filename = "epoch={epoch}-update={update}" if filename is None else filename
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self.every_n_updates, self.every_n_minutes = every_n_updates, every_n_minutes
        alone = every_n_updates is None and every_n_minutes is None and every_n_epochs is None
        self.every_n_epochs = 1 if alone else every_n_epochs
        self.save_on_train_end, self.save_on_exception = save_on_train_end, save_on_exception
        self.on_save_error = on_save_error

        self._kept = Retention(monitor, mode, save_top_k, save_last)
        self._where: str | None = None  # the directory that the kept paths lie in

        self._training = False
        self._saves_at_epoch_end = True
        self._pending = False  # a save waits for the validation of this boundary
        self._from_validation: set[str] = set()  # metrics that only a validation renews
        self._before_validation: dict[str, float] = {}
        self._validated = -1  # boundaries are numbered by updates tried
        self._considered = (-1, False)  # the boundary of the last decision, and whether a validation belonged to it
        self._saved = -1
        self._triggered = 0  # the update at which every_n_updates fired last
        self._clock = 0.0

    @property
    def state_key(self) -> str:
        intervals = (self.every_n_updates, self.every_n_epochs, self.every_n_minutes)
        return f"Checkpoint[monitor={self.monitor!r}, filename={self.filename!r}, every={intervals!r}]"

    @property
    def best_model_path(self) -> str:
        return self._kept.best_path

    @property
    def best_model_score(self) -> float | None:
        return self._kept.best.get(self._kept.best_path)

    @property
    def best_k_models(self) -> dict[str, float]:
        return dict(self._kept.best)

    @property
    def last_model_path(self) -> str:
        return self._kept.last

    @property
    def current_score(self) -> float | None:
        return self._kept.current_score

    def state_dict(self) -> dict[str, Any]:
        return {"dirpath": self._where, **self._kept.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._where = state["dirpath"]
        self._kept.load_state_dict(state)

    # ------------------------------------------------------------------------------------------------------- hooks

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        where, gone = _agreed(trainer, lambda: self._open(trainer))
        if self._where not in (None, where):  # a run that goes on from another's checkpoint ranks only its own
            self._kept.clear()
        self._where = where
        for path in gone:
            self._kept.forget(path)
        self._training, self._pending, self._validated, self._saved = True, False, -1, -1
        boundary = _boundary(trainer)
        self._considered = (boundary, False) if boundary else (-1, False)
        self._triggered = trainer.progress.update
        self._clock = time.monotonic()

    def on_update_end(self, trainer: Trainer, module: Module) -> None:
        update = trainer.progress.update
        due = bool(self.every_n_updates) and update != self._triggered and update % (self.every_n_updates or 1) == 0
        if due:
            self._triggered = update
        if self.every_n_minutes and (trainer.world_size == 1 or _boundary(trainer) % trainer.log_every_n_steps == 0):
            elapsed = time.monotonic() - self._clock >= self.every_n_minutes * 60
            due = trainer.agree(elapsed) or due  # a collective where there are several ranks: all are at this boundary
        if due:
            self._pending = trainer.validation_due
            if not self._pending:
                self._save(trainer)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._before_validation = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        before, self._before_validation = self._before_validation, {}
        self._from_validation |= {k for k, v in trainer.callback_metrics.items() if k not in before or before[k] != v}
        if trainer.sanity_checking:
            return
        self._validated = _boundary(trainer)
        if self._pending:
            self._pending = False
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self.monitor is not None and self._validated >= 0:
            _agreed(trainer, lambda: self._require_monitor(trainer.callback_metrics))
        if self.every_n_epochs and self._saves_at_epoch_end and trainer.progress.epoch % self.every_n_epochs == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if self.save_on_train_end:
            self._save(trainer)
        self._training = False
        if self.monitor is not None and self._validated >= 0:
            _agreed(trainer, lambda: self._require_monitor(trainer.callback_metrics))
        elif self.monitor is not None and trainer.progress.epoch and self.monitor not in trainer.callback_metrics:
            warnings.warn(
                f"no checkpoint was ranked: {self.monitor!r} was never logged and nothing validated", stacklevel=2
            )

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        terminated = isinstance(exception, Terminated) and trainer.checkpoint_callback is self
        agreed_stop = trainer.world_size == 1 or isinstance(exception, STOPS)
        if not ((self.save_on_exception or terminated) and agreed_stop and trainer.at_boundary and self._training):
            return
        if isinstance(exception, CheckpointError):
            return
        if self._saved != _boundary(trainer):
            self._save_on_exception(trainer, exception, keep=not terminated)
        if isinstance(exception, Terminated) and self._saved == _boundary(trainer):
            exception.checkpoint = self._kept.last

    def _save_on_exception(self, trainer: Trainer, exception: BaseException, *, keep: bool) -> None:
        """Save outside of the usual order, to be kept for good, or until the next one is complete."""
        before, dropped = self.state_dict(), []
        try:
            prefix = "exception-" if keep else ""
            path = _agreed(trainer, lambda: self._free_path(trainer, {}, prefix=prefix))
            if keep:
                self._kept.last = path
            else:
                dropped = self._kept.add(path, None)
            trainer.save_checkpoint(path, metrics={})
            self._saved = _boundary(trainer)
            began = trainer.resumed_from
            _agreed(trainer, lambda: self._tidy([path for path in dropped if path != began]))
        except CheckpointError as error:  # the exception that ends training is the one to be seen
            self.load_state_dict(before)
            warnings.warn(f"no checkpoint was saved on {type(exception).__name__}: {error}", stacklevel=2)

    # ------------------------------------------------------------------------------------------------------ saving

    def _save(self, trainer: Trainer) -> None:
        """Decide about a checkpoint of the current weights, once, and carry it out. All ranks call it."""
        boundary = _boundary(trainer)
        fresh = self._validated == boundary
        if self._considered[0] == boundary and (self._considered[1] or not fresh):
            return
        self._considered = (boundary, fresh)
        save: _Save | None = _agreed(trainer, lambda: self._decide(trainer, fresh))
        if save is None:
            return
        before = self.state_dict()
        dropped = self._kept.add(save.path, save.score)  # before the save, which stores these books too
        try:
            trainer.save_checkpoint(save.path, metrics=save.metrics)
        except BaseException as error:
            self.load_state_dict(before)
            if not (isinstance(error, CheckpointError) and self.on_save_error == "warn"):
                raise
            if trainer.is_global_zero:
                warnings.warn(f"training goes on without this checkpoint: {error}", stacklevel=2)
            return
        self._saved = boundary
        self._clock = time.monotonic()
        began = trainer.resumed_from  # stays, so that the same command can be given again
        _agreed(trainer, lambda: self._tidy([path for path in dropped if path != began]))

    def _decide(self, trainer: Trainer, fresh: bool) -> _Save | None:
        """On rank 0: what to save, if anything."""
        values = trainer.callback_metrics
        metrics = {k: float(v) for k, v in values.items() if fresh or k not in self._from_validation}
        score = None if self.monitor is None else metrics.get(self.monitor)
        if not self._kept.wants(score):
            return None
        return _Save(self._free_path(trainer, metrics), score, metrics)

    # ----------------------------------------------------------------------------------------------- on rank 0 alone

    def _open(self, trainer: Trainer) -> tuple[str, list[str]]:
        """The directory, swept of dead saves; and which of the kept checkpoints are not in it."""
        from ..checkpoint import directory

        where = Path(self.dirpath) if self.dirpath is not None else Path(trainer.log_dir) / "checkpoints"
        where = where.absolute()
        if where.is_dir():
            directory.sweep(where)
        known = {*self._kept.paths(), self._kept.last} - {""}
        # a path that a loaded state names may be deleted later, so it has to be a checkpoint that lies here
        return str(where), sorted(p for p in known if Path(p).parent != where or not directory.complete(p))

    def _tidy(self, dropped: Sequence[str]) -> None:
        """After a complete save: point at it, then delete what it replaced."""
        from ..checkpoint import directory

        if self.save_last:
            _replace(Path(self.last_model_path).parent / POINTER, {"path": Path(self.last_model_path).name})
        for path in dropped:
            try:
                directory.delete(Path(path))
            except FileNotFoundError:
                pass  # somebody else removed it
            except OSError as error:
                warnings.warn(
                    f"the checkpoint {path!r} is not needed any more and cannot be deleted: {error}", stacklevel=2
                )

    def _free_path(self, trainer: Trainer, metrics: dict[str, float], prefix: str = "") -> str:
        name = prefix + self.format_name(trainer.progress.epoch, trainer.progress.update, metrics)
        assert self._where is not None
        path, version = Path(self._where) / name, 0
        while path.exists():
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

    def _require_monitor(self, available: dict[str, float]) -> None:
        assert self.monitor is not None
        if self.monitor in available:
            return
        near = difflib.get_close_matches(self.monitor, list(available), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"Checkpoint(monitor={self.monitor!r}): no metric of that name was logged.{hint} "
            f"Logged: {', '.join(sorted(available)) or 'none'}."
        )


def _boundary(trainer: Trainer) -> int:
    return trainer.progress.update + trainer.progress.skipped


def _agreed(trainer: Trainer, function: Callable[[], T]) -> T:
    """Rank 0's answer or error on all ranks; a collective where there are several."""
    return agreed(function, rank=trainer.global_rank, world_size=trainer.world_size)


def _replace(path: Path, values: dict[str, Any]) -> None:
    """Replace a small JSON file as a whole."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
