"""The suite fails where it should: plugins with one planted mistake each, and the check that finds it."""

from __future__ import annotations

import pytest
from trivet.testing import reference, subject
from trivet.testing.checks import CHECKS, compare
from trivet.testing.pool import Pools, TaskFailed
from trivet.testing.reference import Recipe
from trivet.testing.subject import Cell

from . import mutants

CAUGHT = {
    "no reduction": (Cell(mutants.DoesNotReduce(), "fp32", 2), "parity", "losses"),
    "clipping by a local norm": (Cell(mutants.ClipsByItsOwnNorm(), "fp32", 2), "clipping_by_norm", "losses"),
    "mean of means over ranks": (Cell(mutants.TakesTheMeanOfMeans(), "fp32", 2), "parity", "losses"),
    "mean of means over micro-batches": (Cell(mutants.TakesTheMeanOfMeans(), "fp64", 1), "accumulation", "losses"),
    "schedule on a skipped update": (
        Cell(mutants.SaysThatSkippedUpdatesWereApplied(), "fp16-mixed", 2), "overflow", "updates, skipped, scale"
    ),
    "overflow not agreed": (Cell(mutants.JudgesOverflowAlone(), "fp16-mixed", 2), "overflow", "skipped|losses"),
    "fp32 compute under bf16": (
        Cell("ddp", mutants.ComputesInFP32(), 2), "parity", r"matrix products gave \['float32'\], planned bfloat16"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_mistake_is_found(name: str, pools: Pools) -> None:
    cell, check, message = CAUGHT[name]
    with pytest.raises((AssertionError, TaskFailed), match=message):
        CHECKS[check].run(cell, pools)


def test_fp32_compute_under_bf16_is_found_by_the_numbers_alone(pools: Pools) -> None:
    """Even where nobody compares the first update with the Plan."""
    cell = Cell("ddp", mutants.ComputesInFP32(), 2)
    seen = pools[2].run(unchecked, cell, Recipe())
    with pytest.raises(AssertionError, match="first loss"):
        compare(cell, Recipe(), seen, reference.train(Recipe(), 2, cell.dtypes))


def unchecked(cell: Cell, recipe: Recipe) -> subject.Seen:
    """Task: a fit without the comparison of Plan and first update."""
    from trivet.check import FirstUpdate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FirstUpdate, "finish", FirstUpdate.stop)
        return subject.train(cell, recipe)


@pytest.mark.parametrize("precision", ["fp64", "fp16-mixed"])
@pytest.mark.parametrize("check", CHECKS)
def test_the_base_class_alone_is_right(check: str, precision: str, pools: Pools) -> None:
    cell = Cell(mutants.FromTheBaseClass(), precision, 2)
    if CHECKS[check].applies(cell.dtypes):
        CHECKS[check].run(cell, pools)
