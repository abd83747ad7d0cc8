"""What a Trainer does within a run, and how one takes hold of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .errors import ConfigurationError
from .launch import alone
from .state import Progress
from .view import View

if TYPE_CHECKING:
    from .checkpoint.background import Pending
    from .data.datamodule import DataModule
    from .job import Job
    from .launch.world import World
    from .run import Run


class Running(View):
    """The methods of a `Trainer` that modules and callbacks call while it runs, and those that begin and end a run."""

    datamodule: DataModule | None
    at_boundary: bool
    validation_due: bool
    logged_metrics: dict[str, float]
    _started: float

    def save_checkpoint(self, path: str | Path, *, metrics: dict[str, float] | None = None) -> None:
        """Write a checkpoint directory. All ranks call it, at an update boundary; on one process also after `fit`.

        ``metrics`` are stored beside the weights: give those that were computed from exactly these.
        """
        from . import capture
        from .checkpoint import directory

        alone.refuse(f"save_checkpoint({str(path)!r})")
        run = self._kept()
        if self._run is None and run.world.world_size > 1:
            raise ConfigurationError(
                f"save_checkpoint({str(path)!r}) after a run of {run.world.world_size} processes, which do not "
                "communicate any more. Save within it, in a hook such as on_train_end, or use a Checkpoint callback."
            )
        if self._run is not None:
            self._refuse_within_update(path)
        run.background.join()  # one save at a time
        world, own = run.world, capture.own_writer(run.engine)
        state = capture.capture(run)
        directory.write(path, state, rank=world.rank, world_size=world.world_size, metrics=metrics or {}, own=own)

    def save_checkpoint_async(
        self,
        path: str | Path,
        *,
        metrics: dict[str, float] | None = None,
        published: Callable[[], None] = lambda: None,
    ) -> Pending:
        """Write a checkpoint of this moment while training goes on. All ranks call it, at an update boundary.

        Waits for the save before this one, copies the state, and returns what `Pending.wait` waits on; a failure that
        nobody waited for is raised when `fit` ends, which it does only when the checkpoint is complete. ``published``
        is called on rank 0 by the thread that writes, when the checkpoint is complete.
        """
        from . import capture

        alone.refuse(f"save_checkpoint_async({str(path)!r})")
        run = self._active()
        self._refuse_within_update(path)
        if run.engine.strategy.own_folder is not None:
            raise ConfigurationError(
                f"strategy {run.plan.strategy!r} writes a folder of its own, which cannot be done while training goes "
                "on. Use save_checkpoint, or Checkpoint(save_async=False)."
            )
        return run.background.start(path, capture.capture(run), metrics=metrics or {}, published=published)

    def _refuse_within_update(self, path: str | Path) -> None:
        if not self.at_boundary:
            raise ConfigurationError(
                f"save_checkpoint({str(path)!r}) within an update: a run that goes on from there would miss its "
                "batches. Save between two updates: in on_train_batch_end of an update's last batch, in a callback's "
                "on_update_end, or in the hooks of validation and of epochs."
            )

    def full_parameters(self, *, writeback: bool = False) -> AbstractContextManager[None]:
        """A context in which every rank's module holds its parameters whole. All ranks enter it, between updates.
        It needs the memory of the whole module. With ``writeback`` rank 0's changes are kept, on all ranks; without it
        change nothing, since what was not gathered would stay changed. Don't call the module's layers inside.
        """
        alone.refuse("full_parameters()")
        engine = self._active().engine
        return engine.strategy.full_parameters(engine.module, writeback)

    def elapsed(self) -> float:
        """Seconds since this `fit` or `validate` began in this process."""
        return time.monotonic() - self._started

    def agree(self, flag: bool) -> bool:
        """Rank 0's answer, on all ranks. A collective: all ranks call it."""
        alone.refuse("agree()")
        if self.world.world_size == 1:
            return flag
        answer = torch.tensor(float(flag), device=self._active().group.device)
        torch.distributed.broadcast(answer, 0)  # all ranks
        return bool(answer.item())

    # -------------------------------------------------------------------------------------------------------- in runs

    def pulse(self) -> tuple[object, ...]:
        """What changes while the run gets on, first what says that something was trained."""
        at, run = self.progress, self._run
        return (at.epoch, at.batch, at.update, at.skipped), self.stage, run.evaluated if run is not None else 0

    def whereabouts(self) -> str:
        """How far the run is, in words."""
        at, run = self.progress, self._run
        text = f"{self.stage or 'end'}: epoch {at.epoch}, update {at.update}, batch {at.batch}"
        return f"{text}, {run.evaluated} batches evaluated" if run is not None and run.evaluated else text

    def __getstate__(self) -> dict[str, Any]:
        """What workers get: nothing of a job that ended."""
        gone = dict.fromkeys(("_run", "_ended", "_module", "datamodule", "train_data"))
        return {**self.__dict__, **gone, "eval_data": {}, "dataloaders": {}}

    def begin(self, world: World, job: Job) -> None:
        """A job starts in this process."""
        self.world, self.datamodule, self._started = world, job.datamodule, time.monotonic()
        self._module = job.module
        self.at_boundary, self.validation_due, self.stage = True, False, job.stage
        self.forget_data()
        self.hold(job)
        if job.stage == "fit" or world.world_size > 1 or (self._ended and self._ended.module is not job.module):
            self._ended = None  # before what needs memory is made
        self.logged_metrics = {}
        if job.stage == "fit":
            self.progress = Progress()

    def hold(self, job: Job) -> None:
        """Let the job's module and data module reach this Trainer, in the job and after it."""
        object.__setattr__(job.module, "_trainer", self)
        if job.datamodule is not None:
            job.datamodule.trainer = self

    def attach(self, run: Run) -> None:
        """The run that the properties above read from; the module reaches it too."""
        self._run = run
        object.__setattr__(run.module, "_run", run)

    def detach(self) -> None:
        """The run has ended: keep what can be looked at."""
        if self._run is not None:
            self.final_metrics, self.final_shown = self.callback_metrics, self.progress_bar_metrics
            object.__setattr__(self._run.module, "_run", None)
            self._ended = self._ended or self._run
        self._run, self.stage = None, ""
