"""ProgressBar: how far a run is, as a bar on a terminal and as quiet lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from .callback import Callback

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ..module import Module
    from ..trainer import Trainer


class ProgressBar(Callback):
    """Show epoch, updates, speed and the metrics that were logged with ``prog_bar=True``. Writes on rank 0 alone.

    On a terminal there is one bar, which starts again with each epoch, and a second one while validation runs. Where
    the output is a file, a pipe or a notebook, a line is written at the end of each epoch and, within a long one, at
    most every ``line_interval`` seconds. Between two refreshes an update costs one look at the clock; metrics are
    fetched from the device only for a refresh.

    Args:
        refresh_interval: Seconds between two refreshes of the bar; at least 0.1.
        line_interval: Seconds between two lines within an epoch, where there is no terminal.
        leave: Leave the bar of each epoch on the terminal.
        console_options: More for `rich.console.Console`.

    Attributes:
        enabled: False shows nothing.
    """

    def __init__(
        self,
        refresh_interval: float = 0.1,
        line_interval: float = 10.0,
        *,
        leave: bool = False,
        console_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.refresh_interval = max(refresh_interval, 0.1)
        self.line_interval = line_interval
        self.leave, self.console_options, self.enabled = leave, dict(console_options or {}), True
        self._shown_epoch = -1
        self._due = inf  # when to show something; never, on ranks that are silent
        self._interval = line_interval
        self._started = 0.0
        self._tried = 0
        self._rich: Progress | None = None
        self._train: TaskID | None = None
        self._val: TaskID | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rich": None, "_train": None, "_val": None, "_due": inf}

    def get_metrics(self, trainer: Trainer, module: Module) -> dict[str, float]:
        """What is shown behind the bar; override it to leave out some or to add others. Called for a refresh only."""
        return dict(trainer.progress_bar_metrics)

    def disable(self) -> None:
        """Show nothing from the next run on."""
        self.enabled = False

    def enable(self) -> None:
        """The reverse of `disable`."""
        self.enabled = True

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self._start(trainer)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._begin_epoch(trainer)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._begin_epoch(trainer)  # on_train_epoch_start is not called for an epoch that is resumed in its middle

    def on_update_end(self, trainer: Trainer, module: Module) -> None:
        if time.perf_counter() < self._due:
            return
        self._due = time.perf_counter() + self._interval
        if self._rich is None:
            _print(f"{_epoch(trainer)}: {self._speed(trainer)}{_text(self.get_metrics(trainer, module))}")
        else:
            self._refresh(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._due == inf:
            return
        if self._rich is None:
            _print(f"{_epoch(trainer)}: {self._speed(trainer)}{_text(self.get_metrics(trainer, module))}")
        else:
            self._refresh(trainer, module)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._stop()

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._begin_evaluation(trainer, "sanity check" if trainer.sanity_checking else "validation")

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        self._begin_evaluation(trainer, "test")

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        self._begin_evaluation(trainer, "prediction")

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if time.perf_counter() < self._due:
            return
        if self._rich is not None and self._val is not None:
            self._due = time.perf_counter() + self._interval
            self._rich.update(self._val, completed=batch_idx + 1)
            self._rich.refresh()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        self.on_validation_end(trainer, module)  # which is not called for a sanity check

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._rich is not None and self._val is not None:
            self._rich.remove_task(self._val)
            self._val = None

    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._stop()

    def _start(self, trainer: Trainer) -> None:
        self._stop()
        self._shown_epoch = -1
        if not trainer.is_global_zero or not self.enabled:
            return
        on_terminal = is_terminal()
        self._interval = self.refresh_interval if on_terminal else self.line_interval
        self._due = time.perf_counter() + self._interval
        if on_terminal:
            self._rich = _rich_progress(self.leave, self.console_options)
            self._rich.start()

    def _begin_evaluation(self, trainer: Trainer, title: str) -> None:
        if self._due == inf and self._rich is None:  # without fit
            self._start(trainer)
        if self._rich is not None and self._val is None:
            self._val = self._rich.add_task(title, total=None, speed="", metrics="")

    def _stop(self) -> None:
        self._due = inf
        if self._rich is not None:
            self._rich.stop()
        self._rich = self._train = self._val = None

    def _begin_epoch(self, trainer: Trainer) -> None:
        self._started, self._tried = time.perf_counter(), trainer.progress.epoch_update
        if self._due == inf:
            return
        self._due = self._started + self._interval
        if self._rich is not None:
            if self._train is not None and not (self.leave and self._shown_epoch != trainer.current_epoch):
                self._rich.remove_task(self._train)
            self._shown_epoch = trainer.current_epoch
            total = trainer.num_updates
            self._train = self._rich.add_task(_epoch(trainer), total=total, speed="", metrics="")
            self._rich.refresh()

    def _refresh(self, trainer: Trainer, module: Module) -> None:
        if self._rich is None or self._train is None:
            return
        self._rich.update(
            self._train,
            completed=trainer.progress.epoch_update,
            speed=f"{self._rate(trainer):.1f} it/s",
            metrics=_text(self.get_metrics(trainer, module)).removeprefix(", "),
        )
        self._rich.refresh()

    def _rate(self, trainer: Trainer) -> float:
        """Updates per second in this epoch, by this process."""
        tried: int = trainer.progress.epoch_update - self._tried
        return tried / max(time.perf_counter() - self._started, 1e-9)

    def _speed(self, trainer: Trainer) -> str:
        done, total = trainer.progress.epoch_update, trainer.num_updates
        return f"{done}{'' if total is None else f'/{total}'} updates, {self._rate(trainer):.1f} it/s"


def is_terminal() -> bool:
    """Whether standard output is a terminal that a bar can be drawn on. A notebook's output is none."""
    stream = sys.stdout
    if stream is None or not getattr(stream, "encoding", None) or "ipykernel" in sys.modules:
        return False
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # replaced by something that only writes, or closed
        return False


def _rich_progress(leave: bool, console_options: Mapping[str, Any]) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    # auto_refresh would start a thread, and a process that forks data workers is better off without one.
    # What the user prints is redirected by rich, so that it appears above the bar.
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[metrics]}", markup=False),
        console=Console(file=sys.stdout, **console_options),
        auto_refresh=False,
        transient=not leave,
    )


def _epoch(trainer: Trainer) -> str:
    last = trainer.max_epochs
    return f"epoch {trainer.current_epoch + 1}" + (f"/{last}" if last is not None and last > 0 else "")


def _text(metrics: Mapping[str, float]) -> str:
    return "".join(f", {name} {format_value(value)}" for name, value in metrics.items())


def format_value(value: float) -> str:
    """A metric for a line of text: four significant digits, integers as they are."""
    number = float(value)
    return str(int(number)) if isfinite(number) and number == int(number) and abs(number) < 1e15 else f"{number:.4g}"


def _print(text: str) -> None:
    if sys.stdout is not None:
        print(text, flush=True)
