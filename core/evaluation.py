"""Evaluation, from top to bottom: validation (also within a fit), test and prediction.

Every sample exactly once over all ranks: batch ``j`` of the user's loader is evaluated, whole, by rank ``j % world
size``. Where a forward is a collective, a rank whose batches have ended takes part on one that it borrows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .data.joint import joint
from .hooks import call
from .metrics import EPOCH, EVALUATION
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
    if before == "fit" and limit is None:
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
                if together:
                    batches = joint(batches, run.world, run.group.device)
                for batch, index, samples in batches:
                    take_part = one_batch if samples or not together else borrowed_batch
                    take_part(run, kind, root, batch, index, samples, several)
                    mine += samples
                    run.evaluated += 1
                if not mine:
                    metrics.packed.without.append(metrics.suffix)
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
    yield
    name = f"on_{kind}_model_train"
    if kind != "predict" and getattr(type(module), name) is not getattr(Module, name):
        getattr(module, name)()
        return
    for part, training in before.items():
        part.training = training
