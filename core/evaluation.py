"""Evaluation, from top to bottom: validation (also within a fit), test and prediction.

Every sample exactly once over all ranks: batch ``j`` of the user's loader is evaluated, whole, by rank ``j % world
size``. Where a forward is a collective, a rank whose batches have ended takes part on one that it borrows.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .data.joint import joint
from .errors import STOPS
from .hooks import call
from .metrics import EPOCH, EVALUATION, Metrics
from .module import Module
from .rows import log_row
from .run import VALIDATION, Run
from .untouched import untouched

STAGES = {"validation": "validate", "test": "test", "predict": "predict"}  # as hooks and steps say, and as jobs say


def evaluate(run: Run, kind: str, *, limit: int | None = None) -> dict[str, float]:
    """All loaders of ``"validation"``, ``"test"`` or ``"predict"``; returns the epoch's metrics.

    ``limit`` is the number of batches of a sanity check, whose metrics are thrown away.
    """
    hooks, metrics, trainer, strategy = run.hooks, run.metrics_of(kind), run.trainer, run.engine.strategy
    before, trainer.stage = trainer.stage, STAGES[kind] if limit is None else "sanity_check"
    run.metrics, metrics.defaults = metrics, EPOCH if kind != "predict" else None
    breaking = Breaking(run) if before == "fit" and limit is None else None
    if breaking is not None:
        call(hooks.on_validation_model_zero_grad)
    with modes(run.module, kind):
        call(getattr(hooks, f"on_{kind}_start"))
        call(getattr(hooks, f"on_{kind}_epoch_start"))
        root = strategy.evaluate(run.engine.root)
        together = strategy.joint_forward and run.world.world_size > 1
        loaders = run.data[kind]
        run.predictions = [[] for _ in loaders] if run.keeps_predictions else []
        with torch.no_grad() if before == "fit" or strategy.joint_forward else run.gradient_mode():
            for number, data in enumerate(loaders):
                several = (number,) if len(loaders) > 1 else ()
                metrics.suffix = f"/dataloader_idx_{number}" if several else ""
                run.loader, mine = data, 0.0
                batches: Iterable[tuple[Any, int, float]] = islice(data, limit)
                if breaking is not None:
                    batches = breaking.until_asked(batches, together=together)
                elif together:
                    batches = joint(batches, run.world, run.group.device)
                for batch, index, samples in batches:
                    take_part = one_batch if samples or not together else borrowed_batch
                    take_part(run, kind, root, batch, index, samples, several)
                    mine += samples
                    run.evaluated += 1
                if not mine:
                    metrics.packed.without.append(metrics.suffix)
        if breaking is not None and breaking.broken(together=together):
            break_off(run, metrics, breaking.updates)
            raise run.stop.reason(run.progress.update)
        metrics.suffix, metrics.defaults = "", EPOCH if kind != "predict" else None
        if table := getattr(hooks, f"on_{kind}_epoch_end"):
            metrics.epoch_row(reset=False)  # a collective: what they find in trainer.callback_metrics
            call(table)
        row, rows = metrics.epoch_row(), metrics.batch_rows()
        metrics.packed.without = []
        if limit is None:
            for each in (*rows, row):
                log_row(run, each)
            if kind == "validation":
                run.progress.note_validation()
                trainer.validation_due = False
        metrics.defaults = None
        call(getattr(hooks, f"on_{kind}_end"))
        if limit is not None:
            metrics.clear()
    run.metrics, trainer.stage, run.loader = run.train_metrics, before, None
    return row


class Breaking:
    """Breaks a validation within a fit off, on all ranks, where a signal asks the run to end."""

    def __init__(self, run: Run) -> None:
        self.run, self.batches, self._broken = run, 0, False
        run.validations += 1
        self.updates = {path: metric.update_count for path, metric in _stateful(run).items()}

    def until_asked(self, batches: Iterable[Any], *, together: bool) -> Iterable[Any]:
        """The batches of a loader, until all ranks know that they end."""
        run = self.run
        if self._broken:
            return ()
        if together:
            return joint(batches, run.world, run.group.device, lambda: run.stop.requested, self._follow)
        return self._alone(batches)

    def _alone(self, batches: Iterable[Any]) -> Iterator[Any]:
        run = self.run
        for item in batches:
            if run.stop.requested and run.stop.agree_within(run.validations, self.batches, run.group):
                self._broken = True
                return
            self.batches += 1
            yield item

    def _follow(self, signal: int) -> None:
        self._broken, self.run.stop.requested = True, signal

    def broken(self, *, together: bool) -> bool:
        """Whether it was broken off, alike on all ranks. All ranks call it."""
        if not together:
            self._broken = self.run.stop.leave_together(self.run.validations, self._broken, self.run.group)
        return self._broken


def break_off(run: Run, metrics: Metrics, updates: Mapping[str, int]) -> None:
    """Forget what a validation recorded: it was never begun, and a run that goes on from here begins it anew.

    ``updates``: how many each metric object had when it began."""
    values = dict(metrics.values)
    metrics.clear()
    metrics.values.update(values)  # of the validation before
    for one in metrics.object_slots.values():
        if one.used:
            one.metric.reset()
            one.used = one.touched = False
    for path, metric in _stateful(run).items():
        if not updates[path]:
            metric.reset()
        elif metric.update_count != updates[path]:
            warnings.warn(
                f"the validation that was broken off has updated the metric {path!r}, which training uses too: a run "
                "that goes on from here counts these batches twice. Use a metric of its own in each.",
                stacklevel=2,
            )
    run.metrics, run.trainer.stage, run.loader = run.train_metrics, "fit", None
    metrics.suffix, metrics.defaults = "", None


def _stateful(run: Run) -> dict[str, Any]:
    return {} if run.train_metrics.objects is None else run.train_metrics.objects.stateful


def one_batch(
    run: Run, kind: str, root: nn.Module, batch: Any, index: int, samples: float, loader: tuple[int, ...]
) -> None:
    """One batch of one loader; ``loader`` is its number where there are several."""
    hooks, metrics = run.hooks, run.metrics
    run.reseed(VALIDATION, index)
    if run.transfer is not None:
        batch = run.transfer(batch, loader[0] if loader else 0)
    metrics.weight, metrics.defaults = samples, EVALUATION if kind != "predict" else None
    call(getattr(hooks, f"on_{kind}_batch_start"), batch, index, *loader)
    output = root(f"{kind}_step", batch, index, *loader)
    if run.step_boundary is not None:
        run.step_boundary()
    call(getattr(hooks, f"on_{kind}_batch_end"), output, batch, index, *loader)
    if kind == "predict" and run.keeps_predictions:
        assert run.loader is not None
        kept = apply_to_collection(output, Tensor, Tensor.cpu)
        run.predictions[loader[0] if loader else 0].append((index, kept, run.loader.indices))


def borrowed_batch(
    run: Run, kind: str, root: nn.Module, batch: Any, index: int, samples: float, loader: tuple[int, ...]
) -> None:
    """A forward for the other ranks' sake: no hooks, nothing recorded or kept, the module as before."""
    run.reseed(VALIDATION, index)
    if run.transfer is not None:
        batch = run.transfer(batch, loader[0] if loader else 0)
    run.metrics.muted = True
    with untouched(run.module):
        root(f"{kind}_step", batch, index, *loader)
    run.metrics.muted = False


@contextmanager
def modes(module: Module, kind: str) -> Iterator[None]:
    """Evaluation mode, and afterwards each submodule's own, unless the module overrides how it goes back."""
    before = {part: part.training for part in module.modules()}
    getattr(module, f"on_{kind}_model_eval")()
    try:
        yield
    except STOPS:  # broken off: it was never begun
        for part, training in before.items():
            part.training = training
        raise
    name = f"on_{kind}_model_train"
    if kind != "predict" and getattr(type(module), name) is not getattr(Module, name):
        getattr(module, name)()
        return
    for part, training in before.items():
        part.training = training
