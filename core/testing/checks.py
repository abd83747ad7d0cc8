"""The checks of one cell: a combination of strategy, accelerator and precision at a world size, against the reference.

Each check knows plugins only by what they say of themselves (dtypes, loss scaling), never by name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import reference, subject
from .pool import Pools
from .reference import Dtypes, Recipe, Record
from .subject import Cell, Seen


@dataclass(frozen=True)
class Tolerance:
    """How far a run may be from the reference, as a part of the largest element of what is compared.

    ``first_loss`` is computed from the same weights, so only matrix products of other shapes make a difference there.
    ``weights`` None: rounding decides over them, so losses and first gradients are compared instead.
    """

    first_loss: float
    losses: float
    gradients: float
    weights: float | None


# about three times what was seen over all cells, and for float32 and float64 what Trivet promises
TOLERANCES = {
    (torch.float64, torch.float64): Tolerance(1e-14, 1e-12, 1e-13, 1e-12),
    (torch.float32, torch.float32): Tolerance(5e-7, 1e-6, 1e-6, 1e-6),
    (torch.float32, torch.bfloat16): Tolerance(1e-6, 2e-3, 2e-2, None),
    (torch.float32, torch.float16): Tolerance(1e-6, 5e-4, 2e-3, None),
    (torch.bfloat16, torch.bfloat16): Tolerance(1e-2, 2e-2, 2e-2, None),
    (torch.float16, torch.float16): Tolerance(2e-3, 2e-3, 4e-3, None),
}


def tolerance(dtypes: Dtypes) -> Tolerance:
    """The tolerance of a precision, by the dtypes that it names."""
    found = TOLERANCES.get((dtypes.param, dtypes.compute))
    assert found is not None, f"no tolerance is stated for {dtypes.param} with {dtypes.compute}: add it to TOLERANCES"
    return found


def close(actual: Any, expected: Any, bound: float, what: str) -> None:
    """Numbers, tensors, or mappings of them: no element is off by more than ``bound`` of the largest expected one."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: {sorted(set(actual) ^ set(expected))} on one side only"
        for key in expected:
            close(actual[key], expected[key], bound, f"{what} of {key}")
        return
    actual, expected = (torch.as_tensor(side, dtype=torch.float64) for side in (actual, expected))
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    finite = expected[expected.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 1.0
    text = f"{what}: {actual.tolist()}, expected {expected.tolist()}"
    torch.testing.assert_close(actual, expected, atol=bound * largest, rtol=0.0, msg=text)


def losses(seen: Sequence[Seen], recipe: Recipe) -> list[float]:
    """The mean loss of each attempted update, put together from all ranks' micro-batches."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for one in seen:
        for epoch, index, loss, weight in one.steps:
            total, count = sums.get((epoch, index // recipe.accumulate), (0.0, 0.0))
            sums[epoch, index // recipe.accumulate] = total + loss * weight, count + weight
    return [total / count for _, (total, count) in sorted(sums.items())]


def compare(cell: Cell, recipe: Recipe, seen: Sequence[Seen], expected: Record) -> None:
    """What every rank saw against the reference."""
    bounds = tolerance(cell.dtypes)
    for rank, one in enumerate(seen):
        who = f"on rank {rank}: "
        counts = one.updates, one.skipped, one.scale
        assert counts == (expected.updates, expected.skipped, expected.scale), f"{who}updates, skipped, scale: {counts}"
        close(one.rates, expected.rates, 1e-12, f"{who}learning rates")
    found = losses(seen, recipe)
    assert len(found) == len(expected.losses)
    close(found[0], expected.losses[0], bounds.first_loss, "first loss")
    close(found, expected.losses, bounds.losses, "losses")
    for rank, one in enumerate(seen):
        who = f"on rank {rank}: "
        close(one.first_gradients, expected.first_gradients, bounds.gradients, f"{who}first gradient")
        same(one.weights, seen[0].weights, f"{who}weights that differ from rank 0's")
        if bounds.weights is not None:
            close(one.weights, expected.weights, bounds.weights, f"{who}weights")


def same(actual: Any, expected: Any, what: str) -> None:
    """Equal to the bit, in any nesting."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: {sorted(map(str, set(actual) ^ set(expected)))} on one side only"
        for key in expected:
            same(actual[key], expected[key], f"{what}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), what
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            same(*pair, f"{what}/{index}")
    elif isinstance(expected, Tensor):
        assert torch.equal(actual, expected), f"{what}: differs by {(actual - expected).abs().max():.3g}"
    else:
        assert actual == expected, f"{what}: {actual!r}, expected {expected!r}"


def against_reference(cell: Cell, pools: Pools, recipe: Recipe) -> list[Seen]:
    """Train on all ranks and by hand, and compare."""
    seen = pools[cell.world_size].run(subject.train, cell, recipe)
    expected = reference.train(recipe, cell.world_size * recipe.accumulate, cell.dtypes)
    compare(cell, recipe, seen, expected)
    return seen


# ----------------------------------------------------------------------------------------------------------- the checks


def parity(cell: Cell, pools: Pools) -> None:
    """Two epochs with a ragged last batch train like the reference, with SGD and momentum."""
    recipe = Recipe()
    seen = against_reference(cell, pools, recipe)
    last = [(loss, weight) for one in seen for epoch, _, loss, weight in one.steps if epoch == recipe.epochs - 1]
    mean = sum(loss * weight for loss, weight in last) / sum(weight for _, weight in last)
    for one in seen:
        close(one.metrics["loss_epoch"], mean, 1e-6, "the epoch's logged loss, weighted by samples over all ranks")


def accumulation(cell: Cell, pools: Pools) -> None:
    """Three micro-batches an update; the epoch's last window holds one batch of three samples, for up to four ranks."""
    against_reference(cell, pools, Recipe(samples=51, accumulate=3))


def overflow(cell: Cell, pools: Pools) -> None:
    """One rank's loss is inf in the third update: all skip it, the scale backs off, schedule and counter stay."""
    recipe = Recipe(overflow_at=2)
    seen = against_reference(cell, pools, recipe)
    assert cell.dtypes.scaling is not None
    initial, _, backoff, _ = cell.dtypes.scaling
    assert [(one.skipped, one.scale) for one in seen] == [(1, initial * backoff)] * cell.world_size
    assert seen[0].rates[2] == seen[0].rates[1], "the schedule moved on a skipped update"
    assert seen[0].metrics["skipped"] == 1


def clipping_by_norm(cell: Cell, pools: Pools) -> None:
    """Every update is clipped by the global norm of all ranks' mean gradient, which is also reported."""
    recipe = Recipe(clip=0.01)
    seen = against_reference(cell, pools, recipe)
    expected = reference.train(recipe, cell.world_size, cell.dtypes)
    assert min(expected.norms) > recipe.clip  # type: ignore[operator]
    for one in seen:
        close(one.norms, expected.norms, tolerance(cell.dtypes).losses, "gradient norms")


def clipping_by_value(cell: Cell, pools: Pools) -> None:
    """The same elementwise."""
    against_reference(cell, pools, Recipe(clip=0.001, algorithm="value"))


def manual(cell: Cell, pools: Pools) -> None:
    """Two optimizers, and two pairs of backward and step in one training_step, the second after the first's step."""
    against_reference(cell, pools, Recipe(manual=True, clip=0.01))


def manual_accumulation(cell: Cell, pools: Pools) -> None:
    """The same over two micro-batches, with losses that don't depend on each other's step."""
    against_reference(cell, pools, Recipe(samples=30, accumulate=2, manual=True, independent=True))


def resume(cell: Cell, pools: Pools) -> None:
    """train(2n) == train(n) + resume(n) to the bit, at an epoch's end and within an epoch."""
    recipe = Recipe(
        samples=27, optimizer="adamw", dropout=0.3, shuffle=True, accumulate=2 if cell.world_size == 1 else 1
    )
    per_epoch = -(-7 // (cell.world_size * recipe.accumulate))
    for interrupt in ({"max_epochs": 1}, {"max_steps": per_epoch + 1}):
        with tempfile.TemporaryDirectory(prefix="trivet-resume-") as directory:
            path = Path(directory) / "saved"
            answers = pools[cell.world_size].run(subject.resume, cell, recipe, path, interrupt, cell.world_size > 2)
        for rank, (unbroken, resumed) in enumerate(answers):
            who = f"after {interrupt} on rank {rank}"
            steps = [step for step in unbroken.steps if step[:2] >= resumed.steps[0][:2]]
            assert 0 < len(resumed.steps) < len(unbroken.steps)
            same(resumed.steps, steps, f"{who}: losses")
            same(resumed.weights, unbroken.weights, f"{who}: weights")
            same(resumed.optimizers, unbroken.optimizers, f"{who}: optimizers")
            same(resumed.scale, unbroken.scale, f"{who}: scale")
            clocks = {"seconds": 0.0}
            same({**resumed.progress, **clocks}, {**unbroken.progress, **clocks}, f"{who}: progress")


@dataclass(frozen=True)
class Check:
    """``at_four``: worth its time at world size 4 too. ``applies``: to cells with such dtypes."""

    run: Callable[[Cell, Pools], None]
    at_four: bool = False
    applies: Callable[[Dtypes], bool] = lambda dtypes: True

    @property
    def name(self) -> str:
        return self.run.__name__


CHECKS = {
    check.name: check
    for check in (
        Check(parity, at_four=True),
        Check(accumulation, at_four=True),
        Check(overflow, at_four=True, applies=lambda dtypes: dtypes.scaling is not None),
        Check(clipping_by_norm),
        Check(clipping_by_value),
        Check(manual),
        Check(manual_accumulation),
        Check(resume, at_four=True),
    )
}


def checks_of(cell: Cell) -> list[Check]:
    """The checks that mean something in a cell."""
    return [c for c in CHECKS.values() if c.applies(cell.dtypes) and (c.at_four or cell.world_size < 4)]
