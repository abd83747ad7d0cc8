"""Logger: what receives the numbers of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from ..errors import TrivetError


class Logger(ABC):
    """Where metrics and hyperparameters go.

    Every method and property is used on rank 0 alone, except that `log_dir` may also be asked for in the process that
    launches the run, before launch. An object that is not yet open must pickle: it travels to the workers. Selected
    with ``Trainer(logger="name")``; entry points: trivet.loggers. A ``save_dir`` that the constructor takes and the
    user does not give is the Trainer's ``default_root_dir``.
    """

    interface: ClassVar[int] = 1
    rank: int = 0  # of this process; set when a run begins
    prefix: str = ""  # before the names of metrics

    @property
    def name(self) -> str:
        """The name of the experiment; runs of one experiment are told apart by `version`."""
        return ""

    @property
    def version(self) -> int | str | None:
        """Which run of the experiment this is."""
        return None

    def earlier(self) -> list[int | str] | None:
        """The versions that there are already, oldest first. None where a version was given, or there are none: then
        every run writes to the same place."""
        return None

    def go_on(self, version: int | str | None, step: int | None) -> None:
        """This run goes on as ``version``, where there are several, from a checkpoint of update ``step``: what was
        logged of later updates is logged again. Called before anything is logged, by the process that launches too."""
        return

    @property
    def log_dir(self) -> str | None:
        """The directory of this run's files, or None for a logger that writes none. Asking may create it."""
        return None

    @property
    def experiment(self) -> Any:
        """The object behind, for what only it can do (images, text); on other ranks than 0 one that ignores all calls.

        Asking may open it.
        """
        return self if self.rank == 0 else NOTHING

    def prefixed(self, name: str) -> str:
        """The name of a metric behind `prefix`."""
        return f"{self.prefix}-{name}" if self.prefix else name

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics. ``step`` counts applied updates (`Progress.update`); the key ``epoch`` is the epoch."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters; called once before training, values may be anything."""
        return

    def log_graph(self, module: Any, input_array: Any = None) -> None:
        """Record the module's graph, where the logger can and was asked to; called once before training."""
        return

    def save(self) -> None:
        """Make everything logged so far visible to others."""
        return

    def finalize(self, status: str) -> None:
        """The run has ended, with ``status`` ``"success"``, ``"failed"`` or ``"interrupted"``. Close what is open."""
        self.save()


@contextmanager
def writing(logger: Logger) -> Iterator[None]:
    """A full disk, a directory that cannot be written: a TrivetError that says which logger, where and why."""
    try:
        yield
    except OSError as error:
        where = error.filename
        if where is None:  # a write to an open file does not know its name
            with suppress(OSError):
                where = logger.log_dir
        at = f" in {str(where)!r}" if where else ""
        raise TrivetError(
            f"{type(logger).__name__} cannot write{at}: {type(error).__name__}: {error}. Make room there, give a "
            "default_root_dir (or the logger's save_dir) that can be written, or train without: Trainer(logger=False)."
        ) from error


class Nothing:
    """Takes any call of any method, and does nothing: an experiment on a rank that doesn't write it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...


NOTHING = Nothing()


class Silent(Logger):
    """In the place of the loggers of a ``fast_dev_run``: takes all that they would, and writes nothing."""

    @property
    def experiment(self) -> Any:
        return NOTHING

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        """A method that only some logger has."""
        return getattr(NOTHING, name)
