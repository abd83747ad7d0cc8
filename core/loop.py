"""Training, from top to bottom: fit, one epoch, one update. Validation is in `evaluation`.

The unit of progress is the update: one optimizer step over a window of micro-batches. Its order is fixed: accumulate,
reduce, unscale, check that all ranks are finite, clip by the global norm, step, and move the schedule only if the step
was applied. The first half is `Strategy.forward_backward`, the second `Strategy.optimizer_step`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from . import gradients, losses
from .check import FirstUpdate
from .errors import ConfigurationError, DataError, TrivetError
from .evaluation import evaluate
from .hooks import call
from .metrics import EPOCH, STEP
from .plugins import MicroBatch, StepResult
from .rows import log_row
from .run import EPOCH_START, Run
from .untouched import untouched

if TYPE_CHECKING:
    from .configured import Schedule
    from .data.train import Window


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
    if progress.epoch < limits.min_epochs or progress.update < limits.min_steps:
        return False
    return stop_requested(run)


def stop_requested(run: Run) -> bool:
    """``trainer.should_stop`` or ``max_time``, agreed by all ranks where there are several: a collective."""
    out_of_time = run.limits.max_seconds is not None and run.trainer.elapsed() >= run.limits.max_seconds
    wanted = run.trainer.should_stop or out_of_time
    if run.world.world_size == 1:
        return wanted
    flag = torch.tensor(float(wanted), device=run.group.device)
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)  # all ranks
    run.trainer.should_stop = bool(flag.item())
    return run.trainer.should_stop


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
    for window in data.epoch(progress.epoch):
        update(run, window)
        if run.cut:
            data.end_epoch()
            break
        boundary(run)
        if limits.max_steps is not None and progress.update >= limits.max_steps:
            break
        if run.world.world_size > 1:  # asking is a collective, so not after every update
            if progress.update % limits.log_every == 0 and finished(run):
                break
        elif (run.trainer.should_stop or limits.max_seconds is not None) and finished(run):
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


# ------------------------------------------------------------------------------------------------------------- update


def update(run: Run, window: Window) -> None:
    """One update over a window of micro-batches."""
    engine, progress, hooks = run.engine, run.progress, run.hooks
    run.trainer.at_boundary, run.ends_epoch = False, window.last
    run.metrics.defaults = STEP
    root = engine.strategy.refresh(engine.root)
    if root is not engine.root:
        engine.root = root
        gc.collect()  # the old wrapper's autograd hooks live until it is collected
    run.begin_step()
    batches = micro_batches(run, window.batches)
    if hooks.on_train_batch_start:
        first = list(islice(batches, 1))  # its hook may end the epoch instead
        if run.cut:
            return
        batches = chain(first, batches)
    scaler = engine.scaler
    automatic = run.module.automatic_optimization
    if automatic:
        for optimizer in engine.optimizers:
            if hooks.on_before_zero_grad:
                call(hooks.on_before_zero_grad, optimizer)
            run.zero_grad(optimizer)

    scale = None if scaler is None else scaler.scale
    try:
        run.forward_backward(root, batches, scale)
    except (RuntimeError, AttributeError, TypeError) as error:
        at_fault = losses.of_step(run.micro and run.micro.output, engine.device) if automatic else None
        if at_fault is None:
            raise
        raise at_fault from error

    if not automatic:
        result = manual_result(run)
    elif weigh_skipped(run, window):
        result = run.optimizer_step(root, engine.optimizers, clip=run.clip, scaler=scaler, before_step=run.before_step)
    else:
        result = StepResult(applied=False)
    if scaler is not None:
        scaler.update()
    if run.first is not None:
        run.first.finish()
        run.first = None
    progress.epoch_update += 1
    progress.samples += window.samples
    if result is None:
        return  # a module that accumulates by hand: no optimizer stepped yet
    if result.applied:
        progress.update += 1
        if engine.schedules and automatic:
            step_schedules(run, "update")
    else:
        progress.skipped += 1
    if result.norm is not None:
        run.train_metrics.values["grad_norm"] = result.norm
    if run.step_boundary is not None:
        run.step_boundary()


def micro_batches(run: Run, batches: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Hand out micro-batches on the device, with the hooks around each; `boundary` calls the last one's end hook."""
    hooks, metrics = run.hooks, run.train_metrics
    for micro in batches:
        run.micro = micro
        if run.transfer is not None:
            micro.batch = run.transfer(micro.batch, 0)
        metrics.weight = micro.samples
        metrics.muted = borrowed = micro.samples == 0  # a batch without weight, so that this rank can take part
        if hooks.on_train_batch_start and not borrowed and cut(run, micro, first=micro is batches[0]):
            return
        if borrowed:
            with untouched(run.module):
                yield micro
        else:
            yield micro
        run.progress.batch += 1
        if hooks.on_train_batch_end and not micro.last and not borrowed:
            call(hooks.on_train_batch_end, outputs_of(micro), micro.batch, micro.index)


def outputs_of(micro: MicroBatch) -> Any:
    """What hooks see of a step, without its graph: a mapping with ``"loss"``, also where it returned the loss alone, as
    in Lightning."""
    output = apply_to_collection(micro.output, torch.Tensor, torch.Tensor.detach)
    return {"loss": output} if isinstance(output, torch.Tensor) else output


def cut(run: Run, micro: MicroBatch, *, first: bool) -> bool:
    """Call the hook before a batch; whether it answered -1, which ends the epoch before this batch."""
    answers = [hook(micro.batch, micro.index) for hook in run.hooks.on_train_batch_start]
    if not any(type(answer) is int and answer == -1 for answer in answers):
        return False
    if not first:
        raise ConfigurationError(
            f"on_train_batch_start returned -1 for batch {micro.index}, in the middle of an update of "
            f"{run.accumulate} micro-batches: what is accumulated could neither be stepped nor dropped by all "
            "strategies. Return it for the first batch of an update."
        )
    if run.world.world_size > 1:
        run.same_on_all_ranks("on_train_batch_start returned -1", [f"batch {micro.index}"])
    run.cut, run.micro, run.trainer.at_boundary = True, None, True
    return True


def boundary(run: Run) -> None:
    """Between two updates: hooks, records, the validation that is due, a user's wish to stop."""
    progress, hooks, micro, trainer = run.progress, run.hooks, run.micro, run.trainer
    assert micro is not None
    trainer.at_boundary = True
    if hooks.on_train_batch_end and micro.samples:
        call(hooks.on_train_batch_end, outputs_of(micro), micro.batch, micro.index)
    run.micro = None
    run.train_metrics.muted = False
    if progress.update % run.limits.log_every == 0 and progress.update != run.logged_at:
        run.logged_at = progress.update  # a skipped update comes here again with the same number
        log_row(run, run.train_metrics.step_row())
    due = bool(run.data["validation"]) and validation_due(run)
    trainer.validation_due = due or (run.ends_epoch and _validates_at_end(run))
    if hooks.on_update_end:
        call(hooks.on_update_end)
    if due:
        evaluate(run, "validation")
    run.end_step()
    run.boundaries += 1
    if run.stop.requested and run.stop.agree(run.boundaries, run.group):
        raise run.stop.reason(progress.update)


def weigh_skipped(run: Run, window: Window) -> bool:
    """Whether the update goes on when steps returned None; gradients are weighted by what is left.

    Declared with ``on_skip``, all ranks agree in one collective, whose answer is read on the host.
    """
    missing = 0.0
    for micro in window.batches:
        if micro.output is None:
            missing += micro.samples
    if not missing and run.on_skip is None:
        return True
    if run.world.world_size > 1:
        if run.on_skip is None:
            batch = next(micro.index for micro in window.batches if micro.output is None)
            raise TrivetError(
                f"training_step returned None on rank {run.world.rank} for batch {batch}, and the other ranks wait for "
                'its gradients. Say Trainer(on_skip="update") to skip the update on all ranks, or on_skip="samples" '
                "to go on with the other ranks' samples."
            )
        total = torch.tensor(missing, dtype=torch.float64, device=run.group.device)
        torch.distributed.all_reduce(total)  # all ranks, because skipping was declared
        missing = float(total.item())
    if missing and (run.on_skip == "update" or missing >= window.weight):
        return False
    if missing:
        gradients.multiply_(gradients.of(run.engine.optimizers), window.weight / (window.weight - missing))
    return True


def manual_result(run: Run) -> StepResult | None:
    """One result for all optimizers that the module stepped: an update counts once, None where none stepped."""
    results, run.manual_results, run.backwards = run.manual_results, [], 0
    if run.toggled:
        run.untoggle()
    if not results:
        return None
    applied = [result for result in results if result.applied]
    return applied[-1] if applied else results[-1]


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
    mean = torch.tensor(value, dtype=torch.float64, device=run.group.device)
    torch.distributed.all_reduce(mean)  # all ranks: they have the same schedules
    return float(mean.item()) / run.world.world_size


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
