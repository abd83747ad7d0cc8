"""Training, from top to bottom: fit, one epoch, one update, validation.

The unit of progress is the update: one optimizer step over a window of micro-batches. Its order is fixed: accumulate,
reduce, unscale, check that all ranks are finite, clip by the global norm, step, and move the schedule only if the step
was applied. The first half is `Strategy.forward_backward`, the second `Strategy.optimizer_step`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import gradients
from .check import FirstUpdate
from .data.joint import joint
from .errors import ConfigurationError, DataError, TrivetError
from .hooks import call
from .metrics import EPOCH, EVALUATION, STEP
from .plugins import MicroBatch, StepResult
from .run import EPOCH_START, VALIDATION, Run

if TYPE_CHECKING:
    from .data.train import Window
    from .engine import Schedule


# ---------------------------------------------------------------------------------------------------------------- fit


def fit(run: Run) -> None:
    """Train until a limit is reached. Everything is built and, on resume, restored."""
    hooks, module = run.hooks, run.module
    call(hooks.on_fit_start)
    first = FirstUpdate(run.engine, run.plan, run.world)
    if run.limits.sanity_batches and run.val_data and not run.resumed:
        run.trainer.sanity_checking = True
        call(hooks.on_sanity_check_start)
        validate(run, limit=run.limits.sanity_batches)
        call(hooks.on_sanity_check_end)
        run.trainer.sanity_checking = False
    module.train()
    run.metrics = run.train_metrics
    first.watch()
    run.first = first
    call(hooks.on_train_start)
    started, before = time.monotonic(), run.progress.seconds
    while not finished(run):
        train_epoch(run)
        run.progress.seconds = before + time.monotonic() - started
    run.train_metrics.epoch_row(reset=False)  # what an unfinished epoch has so far
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
    data = run.train_data
    assert data is not None
    if progress.epoch_update == 0:
        run.reseed(EPOCH_START, progress.epoch)
        run.metrics.defaults = EPOCH
        call(hooks.on_train_epoch_start)
    elif validation_due(run):
        validate(run)
    for window in data.epoch(progress.epoch):
        update(run, window)
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
    if run.ends_epoch:  # the limit fell on the end of the epoch
        end_epoch(run)


def end_epoch(run: Run) -> None:
    """Schedules, the validation that is due, the epoch's hooks and metrics. Restartable at each save on the way."""
    progress, hooks = run.progress, run.hooks
    if progress.epoch_update == 0:
        raise DataError("the training loader gave no batch in this epoch. Check its data set, sampler and drop_last.")
    if not progress.scheduled:
        step_schedules(run, "epoch", with_metric=False)
        progress.scheduled = True
    if _validates_at_end(run):
        validate(run)
    run.metrics.defaults = EPOCH
    call(hooks.on_train_epoch_end)
    log_row(run, run.train_metrics.epoch_row())
    step_schedules(run, "epoch", with_metric=True)
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
    scaler = engine.scaler
    automatic = run.module.automatic_optimization
    if automatic:
        for optimizer in engine.optimizers:
            if hooks.on_before_zero_grad:
                call(hooks.on_before_zero_grad, optimizer)
            run.zero_grad(optimizer)

    scale = None if scaler is None else scaler.scale
    engine.strategy.forward_backward(root, micro_batches(run, window.batches), scale)

    if not automatic:
        result = manual_result(run)
    elif weigh_skipped(run, window):
        result = engine.strategy.optimizer_step(
            root, engine.optimizers, clip=engine.clip, scaler=scaler, before_step=run.before_step
        )
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
    hooks, metrics, engine = run.hooks, run.train_metrics, run.engine
    for micro in batches:
        run.micro = micro
        if engine.moves:
            micro.batch = engine.move(micro.batch)
        metrics.weight = micro.samples
        metrics.muted = borrowed = micro.samples == 0  # a batch without weight, so that this rank can take part
        if hooks.on_train_batch_start and not borrowed:
            call(hooks.on_train_batch_start, micro.batch, micro.index)
        yield micro
        run.progress.batch += 1
        if not micro.last and not borrowed:
            call(hooks.on_train_batch_end, micro.output, micro.batch, micro.index)


def boundary(run: Run) -> None:
    """Between two updates: hooks, records, the validation that is due, a user's wish to stop."""
    progress, hooks, micro, trainer = run.progress, run.hooks, run.micro, run.trainer
    assert micro is not None
    if hooks.on_train_batch_end and micro.samples:
        call(hooks.on_train_batch_end, micro.output, micro.batch, micro.index)
    run.micro = None
    run.train_metrics.muted = False
    trainer.at_boundary = True
    if progress.update % run.limits.log_every == 0:
        log_row(run, run.train_metrics.step_row())
    due = bool(run.val_data) and validation_due(run)
    trainer.validation_due = due or (run.ends_epoch and _validates_at_end(run))
    if hooks.on_update_end:
        call(hooks.on_update_end)
    if due:
        validate(run)
    run.end_step()
    run.boundaries += 1
    if run.stop.requested and run.stop.agree(run.boundaries, run.group):
        raise KeyboardInterrupt


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
            run.module.lr_scheduler_step(schedule.scheduler, metric)


def monitored(run: Run, schedule: Schedule) -> float:
    """The newest value of a schedule's metric, the same on all ranks: a collective where there are several."""
    available = run.trainer.callback_metrics
    if schedule.monitor not in available:
        raise ConfigurationError(
            f"a scheduler monitors {schedule.monitor!r}, which was never logged. Logged so far: {sorted(available)}."
        )
    value = available[schedule.monitor]
    if run.world.world_size == 1:
        return value
    # a step's value is this rank's own: schedules that act on different numbers would let the ranks' weights differ
    mean = torch.tensor(value, dtype=torch.float64, device=run.group.device)
    torch.distributed.all_reduce(mean)  # all ranks: they have the same schedules
    return float(mean.item()) / run.world.world_size


# --------------------------------------------------------------------------------------------------------- validation


def _epoch_validates(run: Run) -> bool:
    at = run.progress
    return bool(run.val_data) and (at.epoch + 1) % run.limits.val_every_epochs == 0 and at.validated != at.batch


def _validates_at_end(run: Run) -> bool:
    return run.limits.val_every_batches is None and _epoch_validates(run)


def validation_due(run: Run) -> bool:
    """Whether validation within an epoch is due at this boundary and was not done yet."""
    every, progress = run.limits.val_every_batches, run.progress
    if every is None or not _epoch_validates(run):
        return False
    return progress.batch // every > progress.validated // every


def validate(run: Run, *, limit: int | None = None) -> dict[str, float]:
    """All validation loaders, each sample exactly once over all ranks; returns the epoch's metrics.

    ``limit`` is the number of batches of a sanity check, whose metrics are thrown away.
    """
    module, hooks, metrics, trainer = run.module, run.hooks, run.val_metrics, run.trainer
    modes = {part: part.training for part in module.modules()}
    module.eval()
    run.metrics, trainer.validating = metrics, True
    metrics.defaults = EPOCH
    call(hooks.on_validation_start)
    call(hooks.on_validation_epoch_start)
    evaluate = run.engine.strategy.evaluate(run.engine.root)
    several = len(run.val_data) > 1
    together = run.engine.strategy.joint_forward and run.world.world_size > 1
    with torch.no_grad():
        for loader, data in enumerate(run.val_data):
            metrics.suffix = f"/dataloader_idx_{loader}" if several else ""
            batches: Iterable[tuple[Any, int, float]] = islice(data, limit)
            if together:
                batches = joint(batches, run.world, run.group.device)
            for batch, index, samples in batches:
                take_part = validation_batch if samples or not together else borrowed_batch
                take_part(run, evaluate, batch, index, samples, (loader,) if several else ())
    metrics.suffix, metrics.defaults = "", EPOCH
    call(hooks.on_validation_epoch_end)
    row = metrics.epoch_row()
    if limit is None:
        log_row(run, row)
        run.progress.validated = run.progress.batch
        trainer.validation_due = False
    call(hooks.on_validation_end)
    if limit is not None:
        metrics.values.clear()
    for part, training in modes.items():
        part.training = training
    run.metrics, trainer.validating = run.train_metrics, False
    return row


def validation_batch(
    run: Run, evaluate: nn.Module, batch: Any, index: int, samples: float, loader: tuple[int, ...]
) -> None:
    """One batch of one loader; ``loader`` is its number where there are several."""
    hooks, metrics = run.hooks, run.val_metrics
    run.reseed(VALIDATION, index)
    if run.engine.moves:
        batch = run.engine.move(batch)
    metrics.weight, metrics.defaults = samples, EVALUATION
    call(hooks.on_validation_batch_start, batch, index, *loader)
    output = evaluate("validation_step", batch, index, *loader)
    call(hooks.on_validation_batch_end, output, batch, index, *loader)


def borrowed_batch(
    run: Run, evaluate: nn.Module, batch: Any, index: int, samples: float, loader: tuple[int, ...]
) -> None:
    """A forward for the other ranks' sake: no hooks, nothing recorded, buffers as before."""
    buffers = [
        (owner, name, b, b.clone()) for owner in run.module.modules() for name, b in owner.named_buffers(recurse=False)
    ]
    run.reseed(VALIDATION, index)
    run.val_metrics.muted = True
    evaluate("validation_step", run.engine.move(batch), index, *loader)
    run.val_metrics.muted = False
    for owner, name, buffer, before in buffers:
        setattr(owner, name, buffer.copy_(before))


def log_row(run: Run, row: dict[str, float]) -> None:
    """Write a row to the loggers, on rank 0, at the one axis: updates applied."""
    if skipped := float(run.progress.skipped):
        run.train_metrics.values["skipped"] = skipped
        if row or run.trainer.logged_metrics.get("skipped") != skipped:
            row = {**row, "skipped": skipped}
    run.trainer.logged_metrics.update(row)
    if row and run.world.rank == 0:
        for logger in run.trainer.loggers:
            logger.log_metrics({**row, "epoch": float(run.progress.epoch)}, step=run.progress.update)
