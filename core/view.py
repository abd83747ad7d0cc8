"""What can be read off a Trainer, in a run and after one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .callbacks.callback import Callback
from .callbacks.checkpoint import Checkpoint
from .errors import ConfigurationError
from .plugins import Strategy

if TYPE_CHECKING:
    from .engine import Engine
    from .launch.world import World
    from .loggers.logger import Logger
    from .run import Limits, Run
    from .state import Progress


class View:
    """The properties of a `Trainer` that only say what is so."""

    limits: Limits
    progress: Progress
    world: World
    loggers: list[Logger]
    callbacks: list[Callback]
    default_root_dir: Path
    final_metrics: dict[str, float]
    _run: Run | None

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The newest value of every logged metric. Looking fetches them from the device."""
        if self._run is None:
            return self.final_metrics
        return {**self._run.train_metrics.newest(), **self._run.val_metrics.newest()}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Those logged with ``prog_bar=True``."""
        if self._run is None:
            return {}
        return {**self._run.train_metrics.shown(), **self._run.val_metrics.shown()}

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Updates applied."""
        return self.progress.update

    @property
    def max_epochs(self) -> int | None:
        return self.limits.max_epochs

    @property
    def max_steps(self) -> int | None:
        return self.limits.max_steps

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def is_global_zero(self) -> bool:
        return self.world.rank == 0

    @property
    def num_training_batches(self) -> float:
        """Micro-batches of this rank in one epoch; infinity where the loader has no length."""
        data = self._run.train_data if self._run else None
        return float("inf") if data is None or data.num_batches is None else data.num_batches

    @property
    def num_updates(self) -> int | None:
        """Updates in one epoch, None where the loader has no length."""
        data = self._run.train_data if self._run else None
        return None if data is None else data.num_updates

    @property
    def num_val_batches(self) -> list[int | None]:
        """Batches of this rank in each validation loader, None where it has no length."""
        run = self._run
        return [] if run is None else [data.length() for data in run.val_data]

    @property
    def optimizers(self) -> list[Any]:
        return list(self._active().engine.optimizers)

    @property
    def strategy(self) -> Strategy:
        return self._active().engine.strategy

    @property
    def engine(self) -> Engine:
        """The composed parts: ``accelerator``, ``precision``, ``schedules``, ``device``."""
        return self._active().engine

    def set_accumulation(self, batches: int) -> None:
        """How many micro-batches of each rank make an update, for epochs that begin after this. All ranks call it."""
        self.accumulate_grad_batches = batches
        data = self._active().train_data
        if data is not None:
            data.set_accumulation(batches)

    @property
    def log_dir(self) -> Path:
        """Where the first logger writes, or ``default_root_dir``."""
        first = self.loggers[0].log_dir if self.loggers else None
        return Path(first) if first else self.default_root_dir

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        return next((callback for callback in self.callbacks if isinstance(callback, Checkpoint)), None)

    @property
    def log_every_n_steps(self) -> int:
        return self.limits.log_every

    def _active(self) -> Run:
        if self._run is None:
            raise ConfigurationError("this is known only while fit, validate, test or predict runs.")
        return self._run
