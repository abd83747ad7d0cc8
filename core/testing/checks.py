"""The checks of one cell: a combination of strategy, accelerator and precision at a world size, against the reference.

Each check knows plugins only by what they say of themselves (dtypes, loss scaling), never by name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..plugins import Clip
from . import reference, subject
from .pool import Pools
from .reference import Dtypes, Recipe, Record
from .subject import Cell, Seen
from .tolerance import UNDECLARED, Terms


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


def compare(cell: Cell, recipe: Recipe, seen: Sequence[Seen], expected: Record, terms: Terms = UNDECLARED) -> None:
    """What every rank saw against the reference."""
    bounds = terms.bounds(cell.dtypes)
    for rank, one in enumerate(seen):
        who = f"on rank {rank}: "
        counts = one.updates, one.skipped, one.scale
        assert counts == (expected.updates, expected.skipped, expected.scale), f"{who}updates, skipped, scale: {counts}"
        close(one.rates, expected.rates, 1e-12, f"{who}learning rates")
    found = losses(seen, recipe)
    assert len(found) == len(expected.losses)
    close(found[0], expected.losses[0], bounds.first_loss, "first loss")
    try:
        close(found, expected.losses, bounds.losses, "losses")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{told_apart(seen, expected, cell.world_size)}") from None
    for rank, one in enumerate(seen):
        who = f"on rank {rank}: "
        close(one.first_gradients, expected.first_gradients, bounds.gradients, f"{who}first gradient")
        same(one.weights, seen[0].weights, f"{who}weights that differ from rank 0's")
        if bounds.weights is not None:
            close(one.weights, expected.weights, bounds.weights, f"{who}weights")


def told_apart(seen: Sequence[Seen], expected: Record, world_size: int) -> str:
    """How first gradients differ where losses do: a common factor names a mistake that losses do not."""
    texts = []
    for rank, one in enumerate(seen):
        if set(one.first_gradients) != set(expected.first_gradients):
            texts.append(
                f"on rank {rank} of {sorted(one.first_gradients)}, expected {sorted(expected.first_gradients)}"
            )
            continue
        found, wanted = (
            torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])
            for gradients in (one.first_gradients, expected.first_gradients)
        )
        factor = float(found @ wanted / (wanted @ wanted))
        rest = float((found - factor * wanted).norm() / wanted.norm())
        if rest > 0.02:
            texts.append(f"on rank {rank} {rest:.2g} of their length away from the reference's")
            continue
        guess = ""
        if world_size > 1 and abs(factor / world_size - 1) < 0.02:
            guess = " (the sum over ranks, not the average?)"
        elif world_size > 1 and abs(factor * world_size - 1) < 0.02:
            guess = " (divided by the number of ranks twice?)"
        texts.append(f"on rank {rank} {factor:.3g} times the reference's{guess}")
    return "first gradients: " + "; ".join(texts)


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


def against_reference(cell: Cell, pools: Pools, recipe: Recipe, terms: Terms) -> list[Seen]:
    """Train on all ranks and by hand, and compare."""
    seen: list[Seen] = pools[cell.world_size].run(subject.train, cell, recipe, timeout_s=terms.timeout_s)
    expected = reference.train(recipe, cell.world_size * recipe.accumulate, cell.dtypes)
    compare(cell, recipe, seen, expected, terms)
    return seen


# ----------------------------------------------------------------------------------------------------------- the checks


def parity(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """Two epochs with a ragged last batch train like the reference, with SGD and momentum."""
    recipe = Recipe()
    seen = against_reference(cell, pools, recipe, terms)
    last = [(loss, weight) for one in seen for epoch, _, loss, weight in one.steps if epoch == recipe.epochs - 1]
    mean = sum(loss * weight for loss, weight in last) / sum(weight for _, weight in last)
    for one in seen:
        close(one.metrics["loss_epoch"], mean, 1e-6, "the epoch's logged loss, weighted by samples over all ranks")


def accumulation(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """Three micro-batches an update; the epoch's last window holds one batch of three samples, for up to four ranks."""
    against_reference(cell, pools, Recipe(samples=51, accumulate=3), terms)


def overflow(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """One rank's loss is inf in the third update: all skip it, the scale backs off, schedule and counter stay."""
    recipe = Recipe(overflow_at=2)
    seen = against_reference(cell, pools, recipe, terms)
    assert cell.dtypes.scaling is not None
    initial, _, backoff, _ = cell.dtypes.scaling
    assert [(one.skipped, one.scale) for one in seen] == [(1, initial * backoff)] * cell.world_size
    assert seen[0].rates[2] == seen[0].rates[1], "the schedule moved on a skipped update"
    assert seen[0].metrics["skipped"] == 1


def clipping_by_norm(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """Every update is clipped by the global norm of all ranks' mean gradient, which is also reported."""
    recipe = Recipe(clip=0.01)
    seen = against_reference(cell, pools, recipe, terms)
    expected = reference.train(recipe, cell.world_size, cell.dtypes)
    assert min(expected.norms) > recipe.clip  # type: ignore[operator]
    for one in seen:
        close(one.norms, expected.norms, terms.bounds(cell.dtypes).losses, "gradient norms")


def clipping_by_value(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """The same elementwise."""
    against_reference(cell, pools, Recipe(clip=0.001, algorithm="value"), terms)


def manual(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """Two optimizers, and two pairs of backward and step in one training_step, the second after the first's step."""
    against_reference(cell, pools, Recipe(manual=True, clip=0.01), terms)


def manual_accumulation(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """The same over two micro-batches, with losses that don't depend on each other's step."""
    against_reference(cell, pools, Recipe(samples=30, accumulate=2, manual=True, independent=True), terms)


def resume(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """train(2n) == train(n) + resume(n) to the bit, at an epoch's end and within an epoch."""
    accumulates = cell.world_size == 1 and "accumulation" in cell.plugin("strategy").offers
    recipe = Recipe(samples=27, optimizer="adamw", dropout=0.3, shuffle=True, accumulate=2 if accumulates else 1)
    per_epoch = -(-7 // (cell.world_size * recipe.accumulate))
    for interrupt in ({"max_epochs": 1}, {"max_steps": per_epoch + 1}):
        goes_on(cell, pools, recipe, interrupt, terms)


def goes_on(cell: Cell, pools: Pools, recipe: Recipe, interrupt: dict[str, Any], terms: Terms) -> None:
    """A run that ``interrupt`` (limits) ended goes on from its checkpoint as if it had not been ended, to the bit."""
    with tempfile.TemporaryDirectory(prefix="trivet-resume-") as directory:
        path = Path(directory) / "saved"
        answers = pools[cell.world_size].run(
            subject.resume, cell, recipe, path, interrupt, cell.world_size > 2, timeout_s=terms.timeout_s
        )
    for rank, (unbroken, resumed) in enumerate(answers):
        who = f"after {interrupt} on rank {rank}"
        steps = [step for step in unbroken.steps if step[:2] >= resumed.steps[0][:2]]
        assert 0 < len(resumed.steps) < len(unbroken.steps), f"{who}: {len(resumed.steps)} steps were made"
        same(resumed.steps, steps, f"{who}: losses")
        same(resumed.weights, unbroken.weights, f"{who}: weights")
        same(resumed.optimizers, unbroken.optimizers, f"{who}: optimizers")
        same(resumed.scale, unbroken.scale, f"{who}: scale")
        clocks = {"seconds": 0.0}
        same({**resumed.progress, **clocks}, {**unbroken.progress, **clocks}, f"{who}: progress")


@dataclass(frozen=True)
class Check:
    """``offer``: the capability of a strategy that is put to the test, or an empty string. ``asks``: what the run wants
    beside the plugins, as `resolve` names it; where negotiation refuses that, the refusal is what is checked.
    ``at_four``: worth its time at world size 4 too. ``applies``: to cells with such dtypes. ``sizes``: the only numbers
    of processes where it means something, all where it is empty. ``precision``: what it trains with in place of the
    cell's; where negotiation does not admit that, there is nothing to check. ``only_offered``: no run can ask for the
    capability, so there is nothing to refuse where it is not offered.
    """

    run: Callable[..., None]
    offer: str = ""
    asks: Mapping[str, Any] = field(default_factory=dict)
    at_four: bool = False
    applies: Callable[[Dtypes], bool] = lambda dtypes: True
    sizes: tuple[int, ...] = ()
    precision: Any = None
    only_offered: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


CHECKS = {
    check.name: check
    for check in (
        Check(parity, "several_processes", at_four=True),
        Check(accumulation, "accumulation", {"accumulate": 3}, at_four=True),
        Check(overflow, "loss_scaling", at_four=True, applies=lambda dtypes: dtypes.scaling is not None),
        Check(clipping_by_norm, "clipping", {"clip": Clip(0.01)}),
        Check(clipping_by_value, "clipping", {"clip": Clip(0.001, "value")}),
        Check(manual, "manual_optimization", {"manual": True, "clip": Clip(0.01)}),
        Check(manual_accumulation, "manual_optimization", {"manual": True, "accumulate": 2}),
        Check(resume, at_four=True),
    )
}
