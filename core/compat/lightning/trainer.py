"""Trainer: Trivet's, with Lightning's arguments and the order in which Lightning's methods take theirs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from ... import trainer
from ...callbacks.callback import Callback
from ...data.datamodule import DataModule
from ...errors import ConfigurationError
from ...loggers.logger import Logger
from ...module import Module
from ...plugins import Accelerator, Strategy
from ...profilers import Profiler
from .scalar import scalars
from .spelling import NO_ARGUMENT, arguments

# What code reaches for at Lightning's Trainer.
GONE = {
    "accelerator": "Use trainer.engine.accelerator.",
    "check_val_every_n_epoch": "Use trainer.limits.val_every_epochs.",
    "ckpt_path": "Keep the path that you gave.",
    "device_ids": "A process has one device: trainer.engine.device.",
    "enable_validation": "Whether there are validation loaders: bool(trainer.num_val_batches).",
    "fit_loop": "trainer.progress counts epochs, batches, updates and samples.",
    "init_module": "Build layers in the module's configure_model; a sharded strategy calls it on the meta device.",
    "interrupted": "A KeyboardInterrupt is raised to the caller of fit.",
    "num_sanity_val_steps": "Use trainer.num_sanity_val_batches.",
    "lr_find": "Give the learning rate as an argument; there is no search for it.",
    "precision_plugin": "Use trainer.engine.precision.",
    "precision": "Use trainer.engine.precision.",
    "predict_loop": "trainer.predictions is what the last predict returned.",
    "progress_bar_callback": "It is among trainer.callbacks.",
    "received_sigterm": "A signal ends the run after an update, on all ranks.",
    "scaler": "Use trainer.engine.scaler.",
    "state": "trainer.stage is 'fit', 'sanity_check', 'validate', 'test', 'predict' or ''.",
    "test_loop": "trainer.stage says what runs.",
    "tune": "There is no search for a learning rate or a batch size.",
    "validate_loop": "trainer.stage says what runs.",
}


class Trainer(trainer.Trainer):
    """Lightning's arguments: see `trivet.Trainer`, whose own may be given as well."""

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy | Mapping[str, Any] = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Logger | list[Logger] | bool | Any = None,
        callbacks: list[Callback] | Callback | Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        **more: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "more", "__class__")}
        super().__init__(**arguments({**given, **more}, _defaults()))

    # ---------------------------------------------------------------------------------------------------- to call

    def fit(  # type: ignore[override]
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """See `trivet.Trainer.fit`. A data module may stand in the place of the training loader."""
        train_dataloaders, datamodule = _data(train_dataloaders, datamodule)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, _readable(ckpt_path))

    def validate(  # type: ignore[override]
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        dataloaders, datamodule = _data(dataloaders, datamodule)
        found = super().validate(model, dataloaders, datamodule, _readable(ckpt_path))
        return self._shown("Validate", found, verbose)

    def test(  # type: ignore[override]
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        dataloaders, datamodule = _data(dataloaders, datamodule)
        return self._shown("Test", super().test(model, dataloaders, datamodule, _readable(ckpt_path)), verbose)

    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        dataloaders, datamodule = _data(dataloaders, datamodule)
        return super().predict(model, dataloaders, datamodule, return_predictions is not False, _readable(ckpt_path))

    def save_checkpoint(  # type: ignore[override]
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None, **options: Any
    ) -> None:
        if storage_options is not None:
            raise ConfigurationError("save_checkpoint(storage_options=...): a checkpoint is written to a local path.")
        super().save_checkpoint(filepath, **options)  # ``metrics``, of our own callbacks

    def print(self, *args: Any, **options: Any) -> None:
        """``print`` on rank 0 only."""
        if self.is_global_zero:
            print(*args, **options)

    # ---------------------------------------------------------------------------------------------------- to read

    @property
    def lightning_module(self) -> Module:
        return self.module

    model = lightning_module

    @property
    def callback_metrics(self) -> dict[str, Any]:
        return scalars(super().callback_metrics)

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        return scalars(super().progress_bar_metrics)

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self._logged

    @logged_metrics.setter
    def logged_metrics(self, metrics: Mapping[str, float]) -> None:
        self._logged = scalars(metrics)

    @property
    def num_devices(self) -> int:
        """Processes on this machine."""
        return self.world.local_world_size

    @property
    def min_epochs(self) -> int | None:
        return self.limits.min_epochs or None

    @property
    def min_steps(self) -> int | None:
        return self.limits.min_steps or None

    @property
    def gradient_clip_val(self) -> float | None:
        return None if self.clip is None else self.clip.value

    @property
    def gradient_clip_algorithm(self) -> str | None:
        return None if self.clip is None else self.clip.algorithm

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{text}. {GONE[name]}" if name in GONE else text)

    def _shown(self, title: str, found: list[dict[str, float]], verbose: bool) -> list[dict[str, float]]:
        if verbose and self.is_global_zero:
            from rich.console import Console
            from rich.table import Table

            table = Table(f"{title} metric", *(f"DataLoader {number}" for number in range(len(found))))
            for name in dict.fromkeys(name for metrics in found for name in metrics):
                table.add_row(name, *(str(metrics.get(name, "")) for metrics in found))
            Console().print(table)
        return found


@cache
def _defaults() -> dict[str, Any]:
    parameters = inspect.signature(Trainer.__init__).parameters
    return {name: one.default for name, one in parameters.items()} | dict.fromkeys(NO_ARGUMENT.keys() - parameters)


def _data(given: Any, datamodule: DataModule | None) -> tuple[Any, DataModule | None]:
    """Loaders and data module, where the latter may have been given in the place of the former."""
    return (None, given) if isinstance(given, DataModule) else (given, datamodule)


def _readable(path: Any) -> Any:
    if path is not None and (str(path) == "hpc" or str(path).startswith("registry")):
        raise ConfigurationError(f"ckpt_path={path!r}: give a path, 'best' or 'last'.")
    if path is not None and Path(path).is_file():
        raise ConfigurationError(
            f"ckpt_path={str(path)!r} is a file, probably a checkpoint of Lightning's, from which a run cannot go on "
            "here. Take its weights: module = Net.load_from_checkpoint(path), and fit(module) begins with them."
        )
    return path
