"""Learning-rate schedules: which are due, and the metric that some of them watch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .errors import ConfigurationError
from .run import Run
from .slot import wide

if TYPE_CHECKING:
    from .configured import Schedule


def step_schedules(run: Run, interval: str, with_metric: bool | None = None) -> None:
    """Step the schedules of an interval that are due; under manual optimization the module steps its own."""
    if not run.module.automatic_optimization:
        return
    count = run.progress.update if interval == "update" else run.progress.epoch + 1
    for schedule in run.engine.schedules:
        if schedule.interval != interval or count % schedule.frequency:
            continue
        if with_metric is None or with_metric == schedule.wants_metric:
            metric = monitored(run, schedule) if schedule.wants_metric else None
            if metric is not None or not schedule.wants_metric:
                run.module.lr_scheduler_step(schedule.scheduler, metric)


def monitored(run: Run, schedule: Schedule) -> float | None:
    """The newest value of a schedule's metric, the same on all ranks: a collective where there are several. None where
    a schedule that is not strict has to wait for it."""
    available = run.trainer.callback_metrics
    if schedule.monitor not in available:
        if not schedule.strict:
            return None
        raise ConfigurationError(
            f"a scheduler monitors {schedule.monitor!r}, which was never logged. Logged so far: {sorted(available)}. "
            "Log it, or let the scheduler wait for it with 'strict': False in its entry."
        )
    value = available[schedule.monitor]
    if run.world.world_size == 1:
        return value
    # a step's value is this rank's own: schedules that act on different numbers would let the ranks' weights differ
    mean = torch.tensor(value, dtype=wide(run.group.device), device=run.group.device)
    torch.distributed.all_reduce(mean)  # all ranks: they have the same schedules
    return float(mean.item()) / run.world.world_size
