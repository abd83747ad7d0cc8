"""What can be read off a Trainer, in a run and after one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .callbacks.checkpoint import Checkpoint
from .errors import ConfigurationError

if TYPE_CHECKING:
    from .callbacks.callback import Callback
    from .checkpoint.files import Place
    from .configured import Schedule
    from .data.evaluation import EvalData
    from .data.train import TrainData
    from .engine import Engine
    from .launch.world import World
    from .limits import Limits
    from .loggers.logger import Logger
    from .module import Module
    from .plugins import Strategy
    from .run import Run
    from .state import Progress


class View:
    """The properties of a `Trainer` that only say what is so."""

    limits: Limits
    progress: Progress
    world: World
    loggers: list[Logger]
    callbacks: list[Callback]
    default_root_dir: Place
    local_root_dir: Path
    final_metrics: dict[str, float]
    final_shown: dict[str, float]
    predictions: list[Any] | None = None  # what the last `predict` returned
    stage: str  # what runs: "fit", "sanity_check", "validate", "test", "predict", or "" for nothing
    _run: Run | None
    _ended: Run | None
    _module: Module | None

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The newest value of every logged metric. Looking fetches them from the device."""
        if self._run is None:
            return self.final_metrics
        return {name: value for metrics in self._run.every_metrics for name, value in metrics.newest().items()}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Those logged with ``prog_bar=True``."""
        if self._run is None:
            return self.final_shown
        return {name: value for metrics in self._run.every_metrics for name, value in metrics.shown().items()}

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
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def num_nodes(self) -> int:
        return self.world.num_nodes

    @property
    def node_rank(self) -> int:
        return self.world.node_rank

    # ---------------------------------------------------------------------------------------------------- what runs

    @property
    def training(self) -> bool:
        """Whether a fit trains now, and does not validate in between."""
        return self.stage == "fit"

    @property
    def validating(self) -> bool:
        return self.stage == "validate"

    @property
    def sanity_checking(self) -> bool:
        return self.stage == "sanity_check"

    @property
    def testing(self) -> bool:
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation, also the one before a fit, or a test runs."""
        return self.stage in ("validate", "sanity_check", "test")

    @property
    def module(self) -> Module:
        """The module of the run, or of the last one."""
        if self._module is None:
            raise ConfigurationError("this Trainer has no module yet: pass one.")
        return self._module

    # --------------------------------------------------------------------------------------------------------- data

    def forget_data(self) -> None:
        """Let go of what belongs to one job."""
        self.train_data: TrainData | None = None
        self.eval_data: dict[str, list[EvalData]] = {}
        self.dataloaders: dict[str, Any] = {}  # as they were given: "train", "val", "test", "predict"
        self.sizes: tuple[int | None, int | None] | None = None  # of an epoch in workers: batches of a rank, updates

    @property
    def train_dataloader(self) -> Any:
        """What was given to train on, untouched."""
        return self.dataloaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        return self.dataloaders.get("val")

    @property
    def test_dataloaders(self) -> Any:
        return self.dataloaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self.dataloaders.get("predict")

    @property
    def num_training_batches(self) -> float:
        """Micro-batches of this rank in one epoch; infinity where the loader has no length."""
        batches = self._sizes()[0]
        return float("inf") if batches is None else batches

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch that is trained on now is this rank's last of the epoch."""
        run = self._run
        return run is not None and run.ends_epoch and run.micro is not None and run.micro.last

    @property
    def num_updates(self) -> int | None:
        """Updates in one epoch, None where the loader has no length."""
        return self._sizes()[1]

    def _sizes(self) -> tuple[int | None, int | None]:
        data = self.train_data
        return self.sizes or (None, None) if data is None else (data.num_batches, data.num_updates)

    @property
    def estimated_stepping_batches(self) -> float:
        """Updates in the whole fit, as far as its limits and the loader say; infinity where they don't."""
        epochs, steps = self.limits.max_epochs, self.limits.max_steps
        total = None if epochs is None or self.num_updates is None else epochs * self.num_updates
        known = [count for count in (total, steps) if count is not None]
        return min(known) if known else float("inf")

    @property
    def num_val_batches(self) -> list[int | None]:
        """Batches of this rank in each validation loader, None where it has no length."""
        return [data.length() for data in self.eval_data.get("validation", [])]

    @property
    def num_test_batches(self) -> list[int | None]:
        return [data.length() for data in self.eval_data.get("test", [])]

    @property
    def num_predict_batches(self) -> list[int | None]:
        return [data.length() for data in self.eval_data.get("predict", [])]

    @property
    def num_sanity_val_batches(self) -> list[int | None]:
        limit = self.limits.sanity_batches
        return [limit if n is None else min(n, limit) for n in self.num_val_batches]

    @property
    def batch_indices(self) -> list[Any] | None:
        """The indices of the samples in the batch that is evaluated now, where its loader is read by index."""
        loader = self._active().loader
        return None if loader is None else loader.indices

    @property
    def own_predictions(self) -> list[list[tuple[int, Any, list[Any] | None]]]:
        """What this rank predicted so far, by loader: number of the batch, prediction, indices of its samples."""
        return self._active().predictions

    # -------------------------------------------------------------------------------------------------------- parts

    @property
    def optimizers(self) -> list[Any]:
        return list(self._kept().engine.optimizers)

    @property
    def strategy(self) -> Strategy:
        return self._kept().engine.strategy

    @property
    def engine(self) -> Engine:
        """The composed parts: ``accelerator``, ``precision``, ``schedules``, ``device``."""
        return self._kept().engine

    def set_accumulation(self, batches: int) -> None:
        """How many micro-batches of each rank make an update, for epochs that begin after this. All ranks call it."""
        self.accumulate_grad_batches = batches
        data = self._active().train_data
        if data is not None:
            data.set_accumulation(batches)

    @property
    def log_dir(self) -> Path:
        """Where the first logger writes, or ``default_root_dir``, of which a URL does not count."""
        first = self.loggers[0].log_dir if self.loggers else None
        return Path(first) if first else self.local_root_dir

    def stored(self, where: Path) -> Place:
        """Where the run with this ``log_dir`` has its checkpoints: there, unless ``default_root_dir`` is a URL."""
        if isinstance(self.default_root_dir, Path):
            return where
        root = self.local_root_dir.absolute()
        below = where.absolute().relative_to(root).as_posix() if where.absolute().is_relative_to(root) else where.name
        return self.default_root_dir if below == "." else self.default_root_dir / below

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        return next((callback for callback in self.callbacks if isinstance(callback, Checkpoint)), None)

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        from .callbacks.early_stopping import EarlyStopping

        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def lr_scheduler_configs(self) -> list[Schedule]:
        """The schedulers with when each is stepped."""
        return list(self._kept().engine.schedules)

    @property
    def log_every_n_steps(self) -> int:
        return self.limits.log_every

    def _active(self) -> Run:
        if self._run is None:
            raise ConfigurationError("this is known only while fit, validate, test or predict runs.")
        return self._run

    def _kept(self) -> Run:
        """The run, or the one that ended last in this process; of fits, where there was one."""
        run = self._run or self._ended
        if run is None and self.sizes is not None:
            raise ConfigurationError(
                "this fit ran in processes of its own, and its optimizers, schedulers and engine ended with them. Look "
                "at them in a hook, such as on_train_end. What came back: the module's weights, callback_metrics, "
                "progress, num_training_batches, and the callbacks' state with the paths of checkpoints."
            )
        if run is None:
            raise ConfigurationError("this is known only while fit, validate, test or predict runs, and after it.")
        return run
