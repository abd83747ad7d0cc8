"""Logger: what receives the numbers of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar


class Logger(ABC):
    """Where metrics and hyperparameters go.

    Every method and property is used on rank 0 alone, except that `log_dir` may also be asked for in the process that
    launches the run, before launch. An object that is not yet open must pickle: it travels to the workers. Selected
    with ``Trainer(logger="name")``; entry points: trivet.loggers. A ``save_dir`` that the constructor takes and the
    user does not give is the Trainer's ``default_root_dir``.
    """

    interface: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """The name of the experiment; runs of one experiment are told apart by `version`."""
        return ""

    @property
    def version(self) -> int | str | None:
        """Which run of the experiment this is."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The directory of this run's files, or None for a logger that writes none. Asking may create it."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics. ``step`` counts applied updates (`Progress.update`); the key ``epoch`` is the epoch."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters; called once before training, values may be anything."""
        return

    def save(self) -> None:
        """Make everything logged so far visible to others."""
        return

    def finalize(self, status: str) -> None:
        """The run has ended, with ``status`` ``"success"``, ``"failed"`` or ``"interrupted"``. Close what is open."""
        self.save()
