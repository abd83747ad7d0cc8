"""TensorBoardLogger: metrics, hyperparameters and graphs for TensorBoard."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .logger import NOTHING
from .places import FileLogger, write_hparams

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(FileLogger):
    """Write event files to ``save_dir/name/version_N``. Needs the extra ``trivet[tensorboard]``.

    Args:
        save_dir: The directory that holds all experiments.
        name: A directory below it, for runs that belong together.
        version: Which run this is: a number, or the name of a directory. None takes the first number above those that
            exist.
        log_graph: Record the graph of ``module.forward``, from ``module.example_input_array``, before training.
        default_hp_metric: Give hyperparameters without metrics the placeholder ``hp_metric``, so that TensorBoard lists
            them.
        prefix: put before the name of each metric, with a hyphen between.
        sub_dir: A directory below the version, for the files of this logger.
        options: More for `torch.utils.tensorboard.SummaryWriter`: ``comment``, ``purge_step``, ``max_queue``,
            ``flush_secs``, ``filename_suffix``.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                "TensorBoardLogger needs the package tensorboard: pip install 'trivet[tensorboard]'. Without it, "
                "--logger csv writes the same numbers to a table."
            )
        self.save_dir = os.fspath(save_dir)
        self._name, self._version = name or "", version
        self._log_graph, self.default_hp_metric, self.prefix = log_graph, default_hp_metric, prefix
        self.sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self.options = options
        self._writer: SummaryWriter | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}  # an open file stays in its process

    @property
    def log_dir(self) -> str:
        return str(Path(super().log_dir, self.sub_dir or ""))

    @property
    def experiment(self) -> Any:
        """The `torch.utils.tensorboard.SummaryWriter`; on other ranks than 0 an object that ignores all calls."""
        if self.rank != 0:
            return NOTHING
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purged = {} if self._goes_on_at is None else {"purge_step": self._goes_on_at + 1}
            self._writer = SummaryWriter(self.log_dir, **{**purged, **self.options})
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.experiment.add_scalar(self.prefixed(name), float(value), step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Write ``hparams.yaml`` and TensorBoard's table of hyperparameters, with ``metrics`` to compare runs by."""
        write_hparams(Path(self.log_dir), params)
        if metrics is None:
            metrics = {"hp_metric": -1.0} if self.default_hp_metric else {}
        if not metrics:
            return
        from torch.utils.tensorboard.summary import hparams

        self.log_metrics(metrics, 0)
        known = {
            key: value if isinstance(value, (bool, int, float, str)) else repr(value) for key, value in params.items()
        }
        for summary in hparams(known, dict(metrics)):  # type: ignore[no-untyped-call]
            self.experiment.file_writer.add_summary(summary)

    def log_graph(self, module: Any, input_array: Any = None) -> None:
        """Record the graph of ``module.forward``, where ``log_graph=True`` was asked for."""
        if not self._log_graph:
            return
        example = input_array if input_array is not None else getattr(module, "example_input_array", None)
        if example is None:
            warnings.warn(
                f"TensorBoardLogger(log_graph=True): {type(module).__name__} has no example_input_array to trace with.",
                stacklevel=2,
            )
            return
        self.experiment.add_graph(module, example)

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
