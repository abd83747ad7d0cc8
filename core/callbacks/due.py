"""When a checkpoint is due: by updates, epochs or the clock, whichever come first."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..intervals import interval

if TYPE_CHECKING:
    from ..trainer import Trainer


class Due:
    """The intervals of a `Checkpoint`, and how far each has run."""

    def __init__(self, every: Any, updates: int | None, epochs: int | None, minutes: float | None) -> None:
        given = {"every_n_updates": updates, "every_n_epochs": epochs, "every_n_minutes": minutes}
        for name, value in given.items():
            if value is not None and (value < 0 or (name != "every_n_minutes" and type(value) is not int)):
                raise ConfigurationError(f"Checkpoint({name}={value!r}): expected a positive number")
        self.updates, self.epochs, self.minutes = updates, epochs, minutes
        self.part: float | None = None  # of an epoch, where that is no whole number of them
        several = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        if every is not None and several:
            raise ConfigurationError(f"Checkpoint(every={every!r}, {', '.join(several)}): give one of them.")
        if every is not None:
            found = interval("Checkpoint.every", every, "updates", "epochs", "seconds")
            if found.unit == "updates":
                self.updates = found.count
            elif found.unit == "seconds":
                self.minutes = found.number / 60
            elif found.number == found.count:
                self.epochs = found.count
            else:
                self.part = found.number
        elif not several:
            self.epochs = 1
        self._update = 0  # at which ``updates`` fired last
        self._batches = 0  # since the start of the run, where ``part`` was asked for last
        self._clock = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others."""
        return (self.updates, self.part or self.epochs, self.minutes)

    def start(self, trainer: Trainer) -> None:
        if self.part is not None and math.isinf(trainer.num_training_batches):
            raise ConfigurationError(
                f"Checkpoint(every='{self.part:g} epochs'): the training loader has no length. Give updates or a time."
            )
        self._update = trainer.progress.update
        self._batches = trainer.progress.earlier + trainer.progress.batch
        self.saved()

    def saved(self) -> None:
        """The clock begins anew."""
        self._clock = time.monotonic()

    def after_update(self, trainer: Trainer) -> bool:
        """Whether it is due after this update. With a time a collective where there are several ranks, now and then."""
        at = trainer.progress
        due = bool(self.updates) and at.update != self._update and at.update % (self.updates or 1) == 0
        if due:
            self._update = at.update
        if self.part is not None:
            batches, length = at.earlier + at.batch, self.part * trainer.num_training_batches
            due = due or batches // length > self._batches // length
            self._batches = batches
        if self.minutes and (trainer.world_size == 1 or (at.update + at.skipped) % trainer.log_every_n_steps == 0):
            elapsed = time.monotonic() - self._clock >= self.minutes * 60
            due = trainer.agree(elapsed) or due  # all ranks are at this boundary
        return due

    def after_epoch(self, epochs: int) -> bool:
        """Whether it is due when so many epochs are completed."""
        return bool(self.epochs) and epochs % (self.epochs or 1) == 0
