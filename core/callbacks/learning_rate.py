"""LearningRateMonitor: the learning rate of each parameter group, beside the metrics of the same update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..configured import Schedule
    from ..module import Module
    from ..trainer import Trainer


class LearningRateMonitor(Callback):
    """Logs learning rates as ``lr-AdamW``, ``lr-AdamW/pg2``, ``lr-AdamW-1``, or by the scheduler's ``name``.

    A value is the one that the update of its row was made with. Between two rows an update costs one comparison.

    Args:
        logging_interval: ``"step"`` for the rows of ``log_every_n_steps``, ``"epoch"`` for those of epochs (with the
            value that the epoch began with); None for the interval of each scheduler, and steps where there is none.
        log_momentum: log the momentum (or the first beta) too, as ``...-momentum``.
        log_weight_decay: log the weight decay too, as ``...-weight_decay``.

    Attributes:
        lrs: name -> the values that were logged by this process.
        last_momentum_values: name -> the newest momentum.
        last_weight_decay_values: name -> the newest weight decay.
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): expected 'step', 'epoch' or None."
            )
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        self._seen = -1

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._seen = -1

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        update = trainer.progress.update
        if update == self._seen or (update + 1) % trainer.log_every_n_steps:
            return
        self._seen = update
        if self.logging_interval != "epoch":
            self._log(trainer, module, "update")

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        if self.logging_interval != "step":
            self._log(trainer, module, "epoch")

    def _log(self, trainer: Trainer, module: Module, interval: str) -> None:
        schedules = {id(schedule.scheduler.optimizer): schedule for schedule in trainer.engine.schedules}
        for name, optimizer in named(trainer.optimizers, list(schedules.values())):
            schedule = schedules.get(id(optimizer))
            own = "update" if schedule is None else schedule.interval
            if self.logging_interval is None and own != interval:
                continue
            for key, group in zip(group_names(name, optimizer), optimizer.param_groups, strict=True):
                values = {key: float(group["lr"])}
                self.lrs.setdefault(key, []).append(values[key])
                if self.log_momentum:
                    momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                    values[f"{key}-momentum"] = self.last_momentum_values[f"{key}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    decay = float(group.get("weight_decay", 0.0))
                    values[f"{key}-weight_decay"] = self.last_weight_decay_values[f"{key}-weight_decay"] = decay
                for text, value in values.items():
                    module.log(text, value, on_step=interval == "update", on_epoch=interval == "epoch")


def named(optimizers: Sequence[Optimizer], schedules: Sequence[Schedule]) -> list[tuple[str, Optimizer]]:
    """Optimizers with their names, those that have a schedule first: its name, or ``lr-Class``, numbered from 1."""
    scheduled = [(schedule.name, schedule.scheduler.optimizer) for schedule in schedules]
    theirs = {id(optimizer) for _, optimizer in scheduled}
    seen: Counter[str] = Counter()
    found = []
    for name, optimizer in [*scheduled, *((None, one) for one in optimizers if id(one) not in theirs)]:
        if name is None:
            kind = type(optimizer).__name__
            name = f"lr-{kind}-{seen[kind]}" if seen[kind] else f"lr-{kind}"
            seen[kind] += 1
        found.append((name, optimizer))
    return found


def group_names(name: str, optimizer: Optimizer) -> list[str]:
    """A name for each parameter group: the group's own ``name``, or ``pg1``, ``pg2``, ... where there are several."""
    groups = optimizer.param_groups
    own = [group.get("name") or (f"pg{index}" if len(groups) > 1 else "") for index, group in enumerate(groups, 1)]
    twice = sorted(text for text, count in Counter(own).items() if count > 1)
    if twice:
        raise ConfigurationError(
            f"LearningRateMonitor: several parameter groups of {name} have the name {twice[0]!r}; give each its own."
        )
    return [f"{name}/{text}" if text else name for text in own]
