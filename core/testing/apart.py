"""What is checked of a strategy whose ranks differ between synchronisations by design (local SGD, Stich 2019).

On one process it is held to the reference like every other. On several, its declaration is a fact to be seen, not a
waiver: ranks are alike after every so many updates and differ in between, training falls like the reference on
data of which no rank's part stands for the whole, and a run resumed at a synchronisation equals one that never stopped.
"""

from __future__ import annotations

import torch

from . import reference, subject
from .checks import Check, goes_on, same
from .pool import Pools
from .reference import Recipe
from .subject import Cell, Seen
from .tolerance import UNDECLARED, Terms

WORSE = 0.2  # of what the reference gains, a run may gain less


def synchronises(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """Ranks are alike after every so many updates and differ between; the loss falls nearly like the reference's."""
    period = terms.synchronises_every
    recipe = Recipe(samples=4 * cell.world_size * period * 3, apart=cell.world_size)
    seen: list[Seen] = pools[cell.world_size].run(subject.train, cell, recipe, timeout_s=terms.timeout_s)
    updates = len(seen[0].course)
    assert updates == 6 * period, f"{updates} updates were made, expected {6 * period}"
    alike = [all(_equal(one.course[at], seen[0].course[at]) for one in seen) for at in range(updates)]
    for at in range(period - 1, updates, period):
        assert alike[at], f"after update {at + 1} ranks differ; synchronises_every = {period}"
    differ = [at + 1 for at in range(updates) if not alike[at]]
    assert differ, f"ranks are alike after every update: leave out synchronises_every = {period}"
    for rank, one in enumerate(seen):
        same(one.weights, seen[0].weights, f"on rank {rank}: weights at the end that differ from rank 0's")
    first = reference.loss_over(dict(reference.Net().state_dict()), recipe)
    wanted = reference.loss_over(reference.train(recipe, cell.world_size, cell.dtypes).weights, recipe)
    found = reference.loss_over(seen[0].weights, recipe)
    bound = wanted + WORSE * (first - wanted)
    assert found <= bound, (
        f"the loss over all samples fell from {first:.4g} to {found:.4g}, the reference's to {wanted:.4g}; "
        f"expected at most {bound:.4g}"
    )


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def resume_when_alike(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """A run that ended at a synchronisation goes on from its checkpoint as if it had not ended, to the bit."""
    period = terms.synchronises_every
    recipe = Recipe(samples=4 * cell.world_size * period * 2, epochs=1, optimizer="adamw", dropout=0.3, shuffle=True)
    goes_on(cell, pools, recipe, {"max_steps": period}, terms)


APART = {
    check.name: check
    for check in (
        Check(synchronises, "several_processes", at_four=True),
        Check(resume_when_alike, at_four=True),
    )
}
