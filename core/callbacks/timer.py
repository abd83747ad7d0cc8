"""Timer: how long training and validation took, and an end to training after a given time."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer

STAGES = ("train", "validate", "test", "sanity_check", "predict")


class Timer(Callback):
    """Measures the time of each stage, over resumed parts too, and ends training when ``duration`` has passed.

    Time is rank 0's; on several processes a wish to stop is seen by all every ``log_every_n_steps`` updates.

    Args:
        duration: ``"DD:HH:MM:SS"``, a timedelta, or a mapping for one: ``{"hours": 12}``. None to measure only.
        interval: ``"step"`` to look after each update, ``"epoch"`` after each epoch.
        verbose: say so when the time is over.
    """

    def __init__(
        self,
        duration: str | timedelta | Mapping[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigurationError(f"Timer(interval={interval!r}): expected 'step' or 'epoch'.")
        self.duration = None if duration is None else _timedelta(duration).total_seconds()
        self.interval, self.verbose = interval, verbose
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._offset = 0.0
        self._over = False

    def start_time(self, stage: str = "train") -> float | None:
        """When the stage began, by `time.monotonic`; None if it did not."""
        return self._start.get(_checked(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """When the stage ended; None if it did not."""
        return self._end.get(_checked(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent in the stage; of ``"train"`` over all resumed parts."""
        start, offset = self._start.get(_checked(stage)), self._offset if stage == "train" else 0.0
        return offset if start is None else self._end.get(stage, time.monotonic()) - start + offset

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds left of ``duration``; None where there is no limit."""
        return None if self.duration is None else self.duration - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._offset = state["time_elapsed"]["train"]
        self._start.pop("train", None)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("train")
        self._check(trainer)  # the time may be over since a part before this one

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._end["train"] = time.monotonic()

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("sanity_check")

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        self._end["sanity_check"] = time.monotonic()

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._end["validate"] = time.monotonic()

    def on_update_end(self, trainer: Trainer, module: Module) -> None:
        if self.interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self.interval == "epoch":
            self._check(trainer)

    def _begin(self, stage: str) -> None:
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def _check(self, trainer: Trainer) -> None:
        if self.duration is None or not trainer.is_global_zero or self.time_elapsed() < self.duration:
            return
        trainer.should_stop = True
        if self.verbose and not self._over:
            print(f"Timer: {timedelta(seconds=int(self.time_elapsed()))} have passed, training ends.", flush=True)
        self._over = True


def _checked(stage: str) -> str:
    if stage not in STAGES:
        raise ConfigurationError(f"Timer: no stage is named {stage!r}; there are {', '.join(STAGES)}.")
    return stage


def _timedelta(duration: str | timedelta | Mapping[str, int]) -> timedelta:
    if isinstance(duration, timedelta):
        return duration
    if isinstance(duration, Mapping):
        return timedelta(**duration)
    found = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
    if found is None:
        raise ConfigurationError(f"Timer(duration={duration!r}): expected 'DD:HH:MM:SS', a timedelta or a mapping.")
    days, hours, minutes, seconds = map(int, found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
