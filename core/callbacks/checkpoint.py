"""Checkpoint: when to save, under which name, and which checkpoints to keep."""

from __future__ import annotations

import difflib
import math
import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..checkpoint.files import as_path
from ..checkpoint.retention import Retention
from ..errors import STOPS, CheckpointError, ConfigurationError, Terminated
from .due import Due
from .keeping import Flying, Keeping, Save, boundary_of, on_rank_0

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


class Checkpoint(Keeping):
    """Saves checkpoints during training and keeps the best, the newest or all of them.

    A save that is due where a validation is due too waits for it, so that the monitored value of a checkpoint belongs
    to exactly its weights. A checkpoint to whose weights no validation belongs is not ranked: it is kept until the next
    one is complete. Rank 0 decides, all ranks save. A checkpoint is deleted only after the next is complete, and only
    if this run (or the one that it resumes, in the same directory) wrote it.

    Args:
        dirpath: where checkpoints are written; ``checkpoints`` in the trainer's ``log_dir`` by default. It may be a URL
            that fsspec knows, such as ``s3://bucket/run``.
        filename: a template with ``{epoch}`` (epochs completed), ``{update}`` or ``{step}`` (updates applied) and names
            of metrics, each with an optional format: ``"{update:06d}-{val/loss:.3f}"``. Slashes become underscores. An
            existing name gets a suffix ``-v1``, ``-v2``, ...
        monitor: the metric that ranks checkpoints. Without it the newest ``save_top_k`` are kept. One that validation
            or the epoch's end did not bring is an error.
        mode: ``"min"`` or ``"max"``. A value that is NaN is never among the best.
        save_top_k: how many to keep; -1 keeps all, 0 none.
        save_last: always save, keep the newest too, and name it in the file ``last.json`` of ``dirpath``: a small file
            that is replaced as a whole, since links are not to be had on every file system.
        every: one interval with a unit: ``"100 updates"``, ``"0.5 epochs"``, ``"10 min"``, a timedelta; instead of the
            next three.
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
            attributes below still name the last complete one. A directory that cannot be written is found out before
            the first update.
        save_async: training stands still only while its state is copied, and goes on while a thread writes it. One save
            is in flight at a time, and the next waits for it; a failure is raised (or warned of) there, or where
            training ends, which waits too. It takes memory of the host for one more copy of the state. The attributes
            below name a checkpoint from the first update on at which it is complete.

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
        every: str | timedelta | Mapping[str, float] | None = None,
        every_n_updates: int | None = None,
        every_n_epochs: int | None = None,
        every_n_minutes: float | None = None,
        save_on_train_end: bool = True,
        save_on_exception: bool = False,
        on_save_error: str = "raise",
        save_async: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"Checkpoint(mode={mode!r}): expected 'min' or 'max'")
        if on_save_error not in ("raise", "warn"):
            raise ConfigurationError(f"Checkpoint(on_save_error={on_save_error!r}): expected 'raise' or 'warn'")
        if type(save_top_k) is not int or save_top_k < -1:
            raise ConfigurationError(f"Checkpoint(save_top_k={save_top_k!r}): expected -1 (all), 0 (none) or a number")
        self._due = due = Due(every, every_n_updates, every_n_epochs, every_n_minutes)
        self.dirpath = str(dirpath) if dirpath is not None else None
        self.filename = "epoch={epoch}-update={update}" if filename is None else filename
        self.monitor, self.mode, self.save_top_k, self.save_last = monitor, mode, save_top_k, save_last
        self.every_n_updates, self.every_n_epochs, self.every_n_minutes = due.updates, due.epochs, due.minutes
        self.save_on_train_end, self.save_on_exception = save_on_train_end, save_on_exception
        self.on_save_error, self.save_async = on_save_error, save_async

        self._kept = Retention(monitor, mode, save_top_k, save_last)
        self._where: str | None = None  # the directory that the kept paths lie in

        self._training = False
        self._saves_at_epoch_end = True
        self._pending = False  # a save waits for the validation of this boundary
        self._owed = False  # and did so in the run that is resumed, which ended before or within that validation
        self._from_validation: set[str] = set()  # metrics that only a validation renews
        self._before_validation: dict[str, float] = {}
        self._validated = -1  # boundaries are numbered by updates tried
        self._considered = (-1, False)  # the boundary of the last decision, and whether a validation belonged to it
        self._saved = -1
        self._dropped: list[str] = []  # not needed any more, and still there
        self._leaving: list[str] = []  # not needed any more once the save under way is complete
        self._flying: Flying | None = None
        self._unpointed: Exception | None = None  # why `POINTER` does not name the newest checkpoint

    @property
    def state_key(self) -> str:
        return f"Checkpoint[monitor={self.monitor!r}, filename={self.filename!r}, every={self._due.key!r}]"

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
        dropped = [*self._dropped, *self._leaving]  # by whoever goes on from here, if a kill comes first
        return {"dirpath": self._where, **self._kept.state_dict(), "dropped": dropped, "pending": self._pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._where, self._dropped = state["dirpath"], list(state.get("dropped", ()))
        if not self._training:
            self._owed = bool(state.get("pending"))
        self._kept.load_state_dict(state)

    # ------------------------------------------------------------------------------------------------------- hooks

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if self.save_async and trainer.strategy.own_folder is not None:
            raise ConfigurationError(
                "Checkpoint(save_async=True): this strategy writes its state into a folder of its own, which cannot be "
                "done while training goes on. Leave save_async out."
            )
        where, gone, left, barred = on_rank_0(trainer, lambda: self._open(trainer))
        if self._where not in (None, where):  # a run that goes on from another's checkpoint ranks only its own
            self._kept.clear()
        self._where = where
        for path in gone:
            self._kept.forget(path)
        self._training, self._validated, self._saved = True, -1, -1
        self._pending, self._owed = self._owed and boundary_of(trainer) > 0, False
        self._dropped, self._flying, self._unpointed = left, None, None
        self._from_validation |= set(trainer.callback_metrics)  # the last validation's, of the run that is resumed
        boundary = boundary_of(trainer)
        self._considered = (boundary, False) if boundary else (-1, False)
        self._due.start(trainer)
        if barred:
            self._failed(trainer, CheckpointError(barred))

    def on_update_end(self, trainer: Trainer, module: Module) -> None:
        if self._flying is not None and self._flying.pending.done:
            self._notice(trainer)
        if self._due.after_update(trainer):
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
        self._validated = boundary_of(trainer)
        if self._pending:
            self._pending = False
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self.monitor is not None and self._validated >= 0:
            on_rank_0(trainer, lambda: self._require_monitor(trainer.callback_metrics))
        if self._saves_at_epoch_end and self._due.after_epoch(trainer.progress.epoch):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if self.save_on_train_end:
            self._save(trainer)
        self._land(trainer)
        self._training = False
        if self.monitor is not None and self._validated >= 0:
            on_rank_0(trainer, lambda: self._require_monitor(trainer.callback_metrics))
        value = trainer.callback_metrics.get(self.monitor or "", 0.0)
        if self.save_top_k and not self._kept.last and math.isnan(value):
            warnings.warn(f"no checkpoint was saved: {self.monitor!r} was never more than NaN", stacklevel=2)
        elif self.monitor is not None and trainer.progress.epoch and self.monitor not in trainer.callback_metrics:
            warnings.warn(
                f"no checkpoint was ranked: {self.monitor!r} was never logged and nothing validated", stacklevel=2
            )

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._land_alone(trainer)
        terminated = isinstance(exception, Terminated) and trainer.checkpoint_callback is self
        agreed_stop = trainer.world_size == 1 or isinstance(exception, STOPS)
        training, self._training = self._training, False
        if not ((self.save_on_exception or terminated) and agreed_stop and trainer.at_boundary and training):
            return
        if isinstance(exception, CheckpointError):
            return
        if self._saved != boundary_of(trainer):
            self._save_on_exception(trainer, exception, keep=not terminated)
        if isinstance(exception, Terminated) and self._saved == boundary_of(trainer):
            exception.checkpoint = self._kept.last

    def _save_on_exception(self, trainer: Trainer, exception: BaseException, *, keep: bool) -> None:
        """Save outside of the usual order, to be kept for good, or until the next one is complete."""
        before, dropped = self.state_dict(), list(self._dropped)
        try:
            prefix = "exception-" if keep else ""
            path = on_rank_0(trainer, lambda: self._free_path(trainer, {}, prefix=prefix))
            if keep:
                self._kept.last = path
            else:
                dropped += [path for path in self._kept.add(path, None) if path != trainer.resumed_from]
            trainer.save_checkpoint(path, metrics={})
            self._saved, self._dropped = boundary_of(trainer), dropped
            on_rank_0(trainer, self._tidy)
        except CheckpointError as error:  # the exception that ends training is the one to be seen
            self.load_state_dict(before)
            warnings.warn(f"no checkpoint was saved on {type(exception).__name__}: {error}", stacklevel=2)

    # ------------------------------------------------------------------------------------------------------ saving

    def _save(self, trainer: Trainer) -> None:
        """Decide about a checkpoint of the current weights, once, and carry it out. All ranks call it."""
        boundary = boundary_of(trainer)
        fresh = self._validated == boundary
        if self._considered[0] == boundary and (self._considered[1] or not fresh):
            return
        self._considered = (boundary, fresh)
        self._land(trainer)
        before = self.state_dict()
        pending = None
        try:
            save: Save | None = on_rank_0(trainer, lambda: self._decide(trainer, fresh))
            if save is None:
                return
            leaving = self._kept.add(save.path, save.score)  # before the save, which stores these books too
            self._leaving = [path for path in leaving if path != trainer.resumed_from]
            if self.save_async:
                point = partial(self._point_behind, save.path)
                pending = trainer.save_checkpoint_async(save.path, metrics=save.metrics, published=point)
            else:
                trainer.save_checkpoint(save.path, metrics=save.metrics)
        except Exception as error:
            self._failed(trainer, error)
            return
        finally:
            self._leaving = []
            self.load_state_dict(before)
        self._due.saved()
        if pending is not None:
            self._flying = Flying(pending, save, boundary)
            return
        self._book(trainer, save, boundary)
        try:
            on_rank_0(trainer, self._tidy)
        except CheckpointError as error:
            self._failed(trainer, error)
        else:
            self._dropped = []

    def _decide(self, trainer: Trainer, fresh: bool) -> Save | None:
        """On rank 0: what to save, if anything."""
        if self._kept.last and not as_path(self._where or "").is_dir():
            raise CheckpointError(
                f"cannot write checkpoints into {self._where!r}: the directory is gone, and what was saved there"
            )
        values = trainer.callback_metrics
        metrics = {k: float(v) for k, v in values.items() if fresh or k not in self._from_validation}
        score = None if self.monitor is None else metrics.get(self.monitor)
        if not self._kept.wants(score):
            return None
        return Save(self._free_path(trainer, metrics), score, metrics)

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
