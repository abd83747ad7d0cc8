"""Training, from top to bottom: fit, one epoch, its end. One update is in `update`, validation in `evaluation`.

The unit of progress is the update: one optimizer step over a window of micro-batches. Its order is fixed: accumulate,
reduce, unscale, check that all ranks are finite, clip by the global norm, step, and move the schedule only if the step
was applied. The first half is `Strategy.forward_backward`, the second `Strategy.optimizer_step`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from .check import FirstUpdate
from .errors import DataError
from .evaluation import evaluate
from .hooks import call
from .metrics import EPOCH, STEP
from .rows import log_row
from .run import EPOCH_START, Run
from .schedules import step_schedules
from .seeding import mark
from .update import outputs_of, updates

# ---------------------------------------------------------------------------------------------------------------- fit


def fit(run: Run) -> None:
    """Train until a limit is reached. Everything is built and, on resume, restored."""
    hooks, module = run.hooks, run.module
    call(hooks.on_fit_start)
    first = FirstUpdate(run.engine, run.plan, run.world)
    if run.limits.sanity_batches and run.data["validation"] and not run.resumed:
        call(hooks.on_sanity_check_start)
        evaluate(run, "validation", limit=run.limits.sanity_batches)
        call(hooks.on_sanity_check_end)
    module.train()
    run.metrics, run.train_metrics.defaults = run.train_metrics, EPOCH
    first.watch()
    run.first = first
    call(hooks.on_train_start)
    started, before = time.monotonic(), run.progress.seconds
    run.validated_at, run.loaded_in = started, run.progress.epoch
    while run.trainer.limit_train_batches and not finished(run):
        train_epoch(run)
        run.progress.seconds = before + time.monotonic() - started
    run.train_metrics.epoch_row(reset=False)  # what an unfinished epoch has so far
    run.train_metrics.defaults = None
    call(hooks.on_train_end)
    call(hooks.on_fit_end)
    run.engine.strategy.finish(run.engine.root)  # last, since a checkpoint of ``on_train_end`` is one to go on from


def finished(run: Run) -> bool:
    """Whether a limit is reached. All ranks ask at the same boundaries."""
    limits, progress = run.limits, run.progress
    if limits.max_steps is not None and progress.update >= limits.max_steps:
        return True
    if limits.max_epochs is not None and progress.epoch >= limits.max_epochs:
        return True
    return stop_requested(run) and progress.epoch >= limits.min_epochs and progress.update >= limits.min_steps


def stop_requested(run: Run) -> bool:
    """``trainer.should_stop`` or ``max_time``, agreed by all ranks where there are several: a collective.

    Raises, alike on all ranks, where a signal asks to end: it may have come since the newest boundary."""
    stop, out_of_time = run.stop, run.limits.max_seconds is not None and run.trainer.elapsed() >= run.limits.max_seconds
    asks = [float(run.trainer.should_stop or out_of_time), float(stop.requested)]
    if run.world.world_size > 1:
        flags = torch.tensor(asks, device=run.group.device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)  # all ranks
        asks = flags.tolist()
        run.trainer.should_stop = bool(asks[0])
    wanted, signal = bool(asks[0]), int(asks[1])
    if signal and run.boundaries and not wanted:  # before the first boundary there is nothing to save
        stop.requested = signal
        raise stop.reason(run.progress.update)
    return wanted


def train_epoch(run: Run) -> None:
    """One epoch, or what is left of one that is resumed or that a limit ends."""
    progress, hooks, limits = run.progress, run.hooks, run.limits
    if run.reload is not None and progress.epoch_update == 0:
        run.reload()
    data = run.train_data
    assert data is not None
    if progress.epoch_update == 0:
        run.reseed(EPOCH_START, progress.epoch)
        run.metrics.defaults = EPOCH
        call(hooks.on_train_epoch_start)
    elif validation_due(run):
        evaluate(run, "validation")
    run.metrics.defaults = STEP
    update, boundary, trainer = updates(run), boundaries(run), run.trainer
    several, timed = run.world.world_size > 1, limits.max_seconds is not None
    max_steps = math.inf if limits.max_steps is None else limits.max_steps
    for window in data.epoch(progress.epoch, run.ahead):
        update(window)
        if run.cut:
            data.end_epoch()
            break
        boundary()
        if progress.update >= max_steps:
            break
        if several:  # asking is a collective, so not after every update
            if progress.update % limits.log_every == 0 and finished(run):
                break
        elif (trainer.should_stop or timed) and finished(run):
            break
    else:
        end_epoch(run)
        return
    if run.ends_epoch or run.cut:  # the limit fell on the end of the epoch, or a hook ended it
        end_epoch(run)


def end_epoch(run: Run) -> None:
    """Schedules, the validation that is due, the epoch's hooks and metrics. Restartable at each save on the way."""
    progress, hooks = run.progress, run.hooks
    if progress.epoch_update == 0 and not run.cut:
        raise DataError("the training loader gave no batch in this epoch. Check its data set, sampler and drop_last.")
    if not progress.scheduled:
        step_schedules(run, "epoch", with_metric=False)
        progress.scheduled = True
    if _validates_at_end(run):
        evaluate(run, "validation")
    run.metrics.defaults = EPOCH
    if hooks.on_train_epoch_end:
        run.train_metrics.epoch_row(reset=False)  # a collective: what they find in trainer.callback_metrics
        call(hooks.on_train_epoch_end)
    log_row(run, run.train_metrics.epoch_row())
    step_schedules(run, "epoch", with_metric=True)
    run.cut = False
    progress.complete_epoch()
    call(hooks.savers_on_train_epoch_end)


# ------------------------------------------------------------------------------------------------- between two updates


def boundaries(run: Run) -> Callable[[], None]:
    """The function for what is between two updates of this epoch: hooks, records, the validation that is due, a user's
    wish to stop."""
    progress, hooks, trainer, metrics, stop = run.progress, run.hooks, run.trainer, run.train_metrics, run.stop
    ends, update_ends, end_step, log_every = (
        hooks.on_train_batch_end,
        hooks.on_update_end,
        run.end_step,
        run.limits.log_every,
    )
    validates = bool(run.data["validation"])

    def boundary() -> None:
        micro, due = run.micro, False
        assert micro is not None
        trainer.at_boundary = True
        if not micro.samples:
            metrics.muted = False
        elif ends:
            call(ends, outputs_of(micro), micro.batch, micro.index)
        run.micro = None
        if progress.update % log_every == 0 and progress.update != run.logged_at:
            run.logged_at = progress.update  # a skipped update comes here again with the same number
            log_row(run, metrics.step_row())
        if validates:
            due = validation_due(run)
            trainer.validation_due = due or (run.ends_epoch and _validates_at_end(run))
        if update_ends:
            call(update_ends)
        if due:
            evaluate(run, "validation")
        if mark() != run.marked:
            end_step()
        run.boundaries += 1
        if stop.requested and stop.agree(run.boundaries, run.group):
            raise stop.reason(progress.update)

    return boundary


# ------------------------------------------------------------------------------------------- when validation is due


def _epoch_validates(run: Run) -> bool:
    at = run.progress
    if not run.data["validation"] or (at.epoch + 1) % run.limits.val_every_epochs:
        return False
    return at.validated != at.earlier + at.batch


def _validates_at_end(run: Run) -> bool:
    return not run.limits.val_within_epoch and _epoch_validates(run)


def validation_due(run: Run) -> bool:
    """Whether validation within an epoch is due at this boundary and was not done yet. All ranks ask, since a time is
    agreed by a collective."""
    limits, at = run.limits, run.progress
    if not limits.val_within_epoch or not _epoch_validates(run):
        return False
    if (every := limits.val_every_batches) is not None:
        start = 0 if limits.val_across_epochs else at.earlier
        return (at.earlier + at.batch - start) // every > max(0, at.validated - start) // every
    if (every := limits.val_every_updates) is not None:
        return at.update // every > at.validated_update // every
    if run.world.world_size > 1 and at.update % limits.log_every:
        return False
    now = time.monotonic()
    due = run.trainer.agree(now - run.validated_at >= (limits.val_every_seconds or 0.0))
    if due:
        run.validated_at = now
    return due
