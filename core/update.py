"""One update over a window of micro-batches. What it needs on the way is looked up once for each epoch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from . import gradients, losses
from .errors import ConfigurationError, TrivetError
from .hooks import call
from .plugins import MicroBatch, StepResult
from .run import Run
from .schedules import step_schedules
from .seeding import mark
from .slot import wide
from .untouched import untouched

if TYPE_CHECKING:
    from .data.train import Window


def updates(run: Run) -> Callable[[Window], None]:
    """The function that does one update of this epoch."""
    engine, progress, hooks, trainer, metrics = run.engine, run.progress, run.hooks, run.trainer, run.train_metrics
    optimizers, scaler, scheduled = engine.optimizers, engine.scaler, bool(engine.schedules)
    refresh, forward_backward, optimizer_step = engine.strategy.refresh, run.forward_backward, run.optimizer_step
    zero_grad, before_zero_grad, clip, before_step = run.zero_grad, hooks.on_before_zero_grad, run.clip, run.before_step
    automatic, never_skips, step_boundary = run.module.automatic_optimization, run.on_skip is None, run.step_boundary
    begin, begin_step, seeds_device = beginning(run), run.begin_step, run.seed_device is not None

    def update(window: Window) -> None:
        trainer.at_boundary, run.ends_epoch = False, window.last
        root = refresh(engine.root)
        if root is not engine.root:
            engine.root = root
            gc.collect()  # the old wrapper's autograd hooks live until it is collected
        if seeds_device or mark() != run.marked:
            begin_step()
        batches = window.batches
        first = batches[0]
        if not begin(first, True):
            return
        alone = len(batches) == 1 and first.samples
        if automatic:
            for optimizer in optimizers:
                if before_zero_grad:
                    call(before_zero_grad, optimizer)
                zero_grad(optimizer)
        scale = None if scaler is None else scaler.scale
        if run.first is not None:
            run.first.begin()
        try:
            forward_backward(root, batches if alone else in_turn(run, begin, batches), scale)
        except (RuntimeError, AttributeError, TypeError) as error:
            at_fault = losses.of_step(run.micro and run.micro.output, engine.device) if automatic else None
            if at_fault is None:
                raise
            raise at_fault from error
        if alone:
            progress.batch += 1

        if not automatic:
            result = manual_result(run)
        elif (alone and never_skips and first.output is not None) or weigh_skipped(run, window):
            result = optimizer_step(root, optimizers, clip=clip, scaler=scaler, before_step=before_step)
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
            if scheduled:
                step_schedules(run, "update")
        else:
            progress.skipped += 1
        if result.norm is not None:
            metrics.values["grad_norm"] = result.norm
        if step_boundary is not None:
            step_boundary()

    return update


def beginning(run: Run) -> Callable[[MicroBatch, bool], bool]:
    """The function that brings a micro-batch to the device and calls the hooks before it; it says whether to go on."""
    transfer, metrics, starts = run.transfer, run.train_metrics, run.hooks.on_train_batch_start

    def begin(micro: MicroBatch, first: bool) -> bool:
        run.micro = micro
        if transfer is not None:
            micro.batch = transfer(micro.batch, 0)
        metrics.weight = micro.samples
        metrics.muted = not micro.samples  # a batch without weight, so that this rank can take part
        return not (starts and micro.samples and cut(run, micro, first=first))

    return begin


def in_turn(run: Run, begin: Callable[[MicroBatch, bool], bool], batches: list[MicroBatch]) -> Iterator[MicroBatch]:
    """Hand out micro-batches, of which the first was begun, with the hooks around each but those after the last, which
    belong to the boundary."""
    ends = run.hooks.on_train_batch_end
    for micro in batches:
        if micro is not batches[0]:
            begin(micro, False)
        if micro.samples:
            yield micro
        else:
            with untouched(run.module):
                yield micro
        run.progress.batch += 1
        if ends and not micro.last and micro.samples:
            call(ends, outputs_of(micro), micro.batch, micro.index)


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
        total = torch.tensor(missing, dtype=wide(run.group.device), device=run.group.device)
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
