"""What is exact to the last digits: how a global batch is cut makes no difference, nor does a parameter's thaw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trivet.testing import reference, subject
from trivet.testing.checks import close, compare, losses
from trivet.testing.pool import Pools, TaskFailed
from trivet.testing.reference import Dtypes, Recipe
from trivet.testing.subject import Cell

from . import mutants

FP64 = Dtypes(torch.float64, torch.float64)
FROZEN = ("fc1.weight", "fc1.bias", "offset")


@pytest.mark.parametrize("tokens", [False, True], ids=["samples", "tokens"])
def test_accumulation_processes_and_one_big_batch_give_the_same_losses(tokens: bool, pools: Pools) -> None:
    """4 micro-batches on one process, 2 on two, 1 on four, and whole batches by hand; the last batches are ragged."""
    expected = reference.train(Recipe(samples=53, epochs=3, tokens=tokens), 4, FP64)
    assert len(expected.losses) == 12
    for world_size, accumulate in ((1, 4), (2, 2), (4, 1)):
        recipe = Recipe(samples=53, epochs=3, accumulate=accumulate, tokens=tokens)
        seen = pools[world_size].run(subject.train, Cell("auto", "fp64", world_size), recipe)
        close(losses(seen, recipe), expected.losses, 1e-12, f"losses of {accumulate} on {world_size}")
        for one in seen:
            close(one.weights, expected.weights, 1e-12, f"weights of {accumulate} on {world_size}")


@pytest.mark.parametrize(
    "strategy", ["ddp", {"name": "ddp", "gradient_as_bucket_view": False}, mutants.FromTheBaseClass()]
)
def test_a_parameter_that_thaws_in_the_second_epoch_trains_like_the_reference(strategy: Any, pools: Pools) -> None:
    recipe = Recipe(epochs=3, accumulate=2, frozen=FROZEN, unfreeze_at=1)
    cell = Cell(strategy, "fp64", 2)
    seen = pools[2].run(subject.train, cell, recipe)
    compare(cell, recipe, seen, reference.train(recipe, 4, FP64))


def test_a_refresh_that_is_left_out_is_found(pools: Pools) -> None:
    recipe = Recipe(epochs=2, frozen=FROZEN, unfreeze_at=1)
    cell = Cell(mutants.KeepsTheOldWrapper(), "fp64", 2)
    seen = pools[2].run(subject.train, cell, recipe)
    with pytest.raises(AssertionError, match="losses"):
        compare(cell, recipe, seen, reference.train(recipe, 2, FP64))


@pytest.mark.parametrize("strategy", ["ddp", mutants.FromTheBaseClass()])
def test_a_parameter_that_thaws_on_one_rank_only_is_an_error_that_names_it(strategy: Any, pools: Pools) -> None:
    recipe = Recipe(epochs=2, frozen=("fc1.bias",), unfreeze_at=1)
    with pytest.raises(TaskFailed) as caught:
        pools[2].run(impatient, Cell(strategy, "fp32", 2), recipe)
    assert "unfrozen or added on rank 1: ['fc1.bias']" in str(caught.value)
    assert set(caught.value.failures) == {0, 1}


def impatient(cell: Cell, recipe: Recipe) -> None:
    """Task: a fit in which only rank 1 unfreezes, and where ranks wait shortly for one another."""
    from trivet import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "SAME_S", 2.0)
        subject.train(cell, recipe, odd_rank=1)


def elements_reduced(cell: Cell, recipe: Recipe) -> list[int]:
    """Task: how many numbers this rank's collectives held in each update, as torch's own profiler saw them."""
    from torch.profiler import ProfilerActivity, profile

    counts: list[int] = []

    class Counting(subject.Subject):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profiler.__enter__()

        def on_update_end(self) -> None:
            super().on_update_end()
            self.profiler.__exit__(None, None, None)
            counts.append(
                sum(
                    torch.Size(shape).numel()
                    for event in self.profiler.events()
                    if event.name == "gloo:all_reduce"
                    for shape in event.input_shapes
                )
            )

    cell.trainer(recipe).fit(Counting(recipe), subject.loader(recipe))
    return counts


def test_frozen_parameters_cost_no_communication(pools: Pools) -> None:
    """Before the thaw the trainable gradients travel, once; after it all do, once: no old reducer is left."""
    recipe = Recipe(samples=16, epochs=2, frozen=FROZEN, unfreeze_at=1)
    sizes = {name: param.numel() for name, param in reference.Net().named_parameters()}
    everything = sum(sizes.values())
    trainable = everything - sum(sizes[name] for name in FROZEN)
    for rank, counts in enumerate(pools[2].run(elements_reduced, Cell("ddp", "fp32", 2), recipe)):
        assert counts == [trainable, trainable, everything, everything], f"rank {rank}"
