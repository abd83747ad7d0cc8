"""EarlyStopping: end training when a metric no longer gets better."""

from __future__ import annotations

import difflib
import math
import warnings
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from ..checkpoint.agree import agreed
from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


class EarlyStoppingReason(Enum):
    """Why training was stopped."""

    NOT_STOPPED = "not_stopped"
    STOPPING_THRESHOLD = "stopping_threshold"
    DIVERGENCE_THRESHOLD = "divergence_threshold"
    PATIENCE_EXHAUSTED = "patience_exhausted"
    NON_FINITE_METRIC = "non_finite_metric"


class EarlyStopping(Callback):
    """Ends training when ``monitor`` did not improve in ``patience`` checks in a row, or has passed a threshold.

    All ranks judge rank 0's value, so that they agree. State is stored in checkpoints; ``patience`` is not a part of
    it, so that a run that ended here can be given more. A resumed run whose patience is exhausted already ends at once.

    Args:
        monitor: the metric to watch.
        min_delta: what a value has to be better by to count as an improvement.
        patience: checks without improvement after which training ends. A check follows each validation, or each epoch
            (see ``check_on_train_epoch_end``).
        verbose: say when the metric improves and why training is ended.
        mode: ``"min"`` or ``"max"``: which way is better.
        strict: raise when the metric was not logged; False to wait for it.
        check_finite: end training when the metric is NaN or infinite.
        stopping_threshold: end training once the metric is better than this.
        divergence_threshold: end training once the metric is worse than this.
        check_on_train_epoch_end: check at the end of an epoch, with the training epoch's metrics too; False for after
            each validation. By default the former where every epoch has one validation, at its end.
        log_rank_zero_only: accepted for Lightning's sake; only rank 0 prints.

    Attributes:
        wait_count: checks since the last improvement.
        best_score: the best value so far.
        stopped_epoch: the epoch, from 0, in which training was ended; 0 if it was not.
        stopping_reason: an `EarlyStoppingReason`.
        stopping_reason_message: the same in words, or None.
    """

    watches: ClassVar[bool] = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"EarlyStopping(mode={mode!r}): expected 'min' or 'max'.")
        if type(patience) is not int or patience < 0:
            raise ConfigurationError(f"EarlyStopping(patience={patience!r}): expected a whole number from 0 up.")
        self.monitor, self.min_delta, self.patience, self.verbose = monitor, abs(min_delta), patience, verbose
        self.mode, self.strict, self.check_finite = mode, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end, self.log_rank_zero_only = check_on_train_epoch_end, log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = math.inf if mode == "min" else -math.inf
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._at_epoch_end = True
        self._training = self._checked = False

    @property
    def state_key(self) -> str:
        return f"EarlyStopping[monitor={self.monitor!r}, mode={self.mode!r}]"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wait_count, self.stopped_epoch = state["wait_count"], state["stopped_epoch"]
        self.best_score = float(state["best_score"])
        self.stopping_reason = EarlyStoppingReason(state["stopping_reason"])
        self.stopping_reason_message = state["stopping_reason_message"]

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        each_epoch = trainer.val_check_interval == 1.0 and trainer.limits.val_every_epochs == 1
        chosen = self.check_on_train_epoch_end
        self._at_epoch_end, self._training = each_epoch if chosen is None else chosen, True
        self._checked = False
        if self.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED and self.wait_count >= self.patience:
            trainer.should_stop = self._checked = True
            if trainer.is_global_zero:
                warnings.warn(
                    f"EarlyStopping had ended this run already: {self.stopping_reason_message} To go on, give a "
                    f"patience of more than {self.patience}.",
                    stacklevel=2,
                )

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._training = False
        if not self._checked and trainer.is_global_zero and not trainer.fast_dev_run:
            warnings.warn(
                f"EarlyStopping never looked at {self.monitor!r}: training ended before an epoch or a validation did.",
                stacklevel=2,
            )

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if self._at_epoch_end:
            self._check(trainer, epoch=trainer.progress.epoch - 1)  # this one is counted as completed already

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._training and not self._at_epoch_end:
            self._check(trainer, epoch=trainer.progress.epoch)

    def _check(self, trainer: Trainer, epoch: int) -> None:
        self._checked = True
        if trainer.fast_dev_run:
            return
        current = agreed(lambda: self._value(trainer), rank=trainer.global_rank, world_size=trainer.world_size)
        if current is None:
            return
        before = self.best_score
        reason, message = self._judge(current)
        self.stopping_reason = reason
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopped_epoch, self.stopping_reason_message = epoch, message
            trainer.should_stop = True
        elif before != self.best_score:
            message = f"{self.monitor} improved from {before:.4g} to {self.best_score:.4g}."
        if message and self.verbose and trainer.is_global_zero:
            print(f"EarlyStopping: {message}", flush=True)

    def _value(self, trainer: Trainer) -> float | None:
        """On rank 0: the newest value, or None where there is none yet and that is allowed."""
        available = trainer.callback_metrics
        if self.monitor in available:
            return float(available[self.monitor])
        near = difflib.get_close_matches(self.monitor, list(available), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        text = (
            f"EarlyStopping(monitor={self.monitor!r}): no metric of that name was logged.{hint} "
            f"Logged: {', '.join(sorted(available)) or 'none'}."
        )
        if self.strict:
            raise ConfigurationError(f"{text} With strict=False it waits for one.")
        if self.verbose:
            warnings.warn(text, stacklevel=2)
        return None

    def _judge(self, current: float) -> tuple[EarlyStoppingReason, str]:
        """Why to stop, with a sentence, keeping the books about the best value."""
        limit, worst = self.stopping_threshold, self.divergence_threshold
        if self.check_finite and not math.isfinite(current):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{self.monitor} is {current!r}."
        if limit is not None and self._better(current, limit):
            return EarlyStoppingReason.STOPPING_THRESHOLD, f"{self.monitor} = {current:.4g} is better than {limit:.4g}."
        if worst is not None and self._better(worst, current):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"{self.monitor} = {current:.4g} is worse than {worst:.4g}.",
            )
        margin = -self.min_delta if self.mode == "min" else self.min_delta
        if self._better(current, self.best_score + margin):
            self.best_score, self.wait_count = current, 0
            return EarlyStoppingReason.NOT_STOPPED, ""
        self.wait_count += 1
        if self.wait_count < self.patience:
            return EarlyStoppingReason.NOT_STOPPED, ""
        return (
            EarlyStoppingReason.PATIENCE_EXHAUSTED,
            f"{self.monitor} did not improve in {self.wait_count} checks; the best was {self.best_score:.4g}.",
        )

    def _better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other
