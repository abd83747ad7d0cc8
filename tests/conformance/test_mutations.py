"""The suite fails where it should: plugins with one planted mistake each, and the check that finds it."""

from __future__ import annotations

from typing import Any

import pytest
from trivet.testing import cells, reference, subject
from trivet.testing.checks import CHECKS, compare
from trivet.testing.pool import Pools, TaskFailed
from trivet.testing.reference import Recipe
from trivet.testing.subject import Cell, name_of
from trivet.testing.tolerance import Terms
from trivet.testing.unlike import UNLIKE

from . import mutants

CAUGHT = {
    "no reduction": (Cell(mutants.DoesNotReduce(), "fp32", 2), "parity", "losses"),
    "clipping by a local norm": (Cell(mutants.ClipsByItsOwnNorm(), "fp32", 2), "clipping_by_norm", "losses"),
    "sum over ranks": (
        Cell(mutants.SumsGradients(), "fp32", 2), "parity", r"rank 1 2 times the reference's \(the sum over ranks, not"
    ),
    "reduction in another dtype": (Cell(mutants.SendsWhatItHas(), "fp32", 2), "reduction", "to context.policy.reduce"),
    "reduction in another dtype, unseen": (
        Cell(mutants.SendsWhatItHasUnseen(), "fp32", 2), "reduction", "as exact as if they had travelled in float32"
    ),
    "no agreement on what is sent": (
        Cell(mutants.AsksNobody(), "fp32", 2), "unlike_layers", "Agree which gradients exist before you send"
    ),
    "skipped samples that count": (Cell(mutants.WeighsSkippedSamples(), "fp64", 2), "skipping", "losses"),
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
        cells.named(check).run(cell, pools, Terms(timeout_s=20.0))


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


@pytest.mark.parametrize("check", UNLIKE)
@pytest.mark.parametrize(
    "strategy",
    [
        mutants.FromTheBaseClass(),
        {"name": "ddp", "find_unused_parameters": True},
        {"name": "fsdp", "unused_parameters": True},
    ],
    ids=name_of,
)
def test_ranks_with_different_things_to_say(strategy: Any, check: str, pools: Pools) -> None:
    cell = Cell(strategy, "fp32", 2)
    assert check in cells.checks_in(cell)
    if cells.outcome(cell, UNLIKE[check]) == "ok":
        UNLIKE[check].run(cell, pools)


def test_what_no_run_can_ask_for_is_tried_only_where_it_is_offered() -> None:
    assert "unlike_layers" not in cells.checks_in(Cell("ddp", "fp32", 2))
    assert "unlike_layers" in cells.checks_in(Cell("zero", "fp32", 2))
