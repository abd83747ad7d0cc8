"""What is checked of a strategy whose ranks have different things to tell each other, on two processes.

Gradients in another dtype on the way, layers that only some ranks use, and a batch that only one rank leaves out.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..plugins import Needs, Policy, Precision
from . import reference
from .checks import Check, against_reference
from .pool import Pools, TaskFailed
from .reference import Dtypes, Recipe
from .subject import Cell
from .tolerance import UNDECLARED, Terms

ROUNDED = 1e-4  # of the largest element: between the tolerance of float32 and the last digit of bfloat16


class NarrowReduction(Precision):
    """float32 everywhere but in what is sent."""

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:float32", "dtype:bfloat16"}))

    @property
    def policy(self) -> Policy:
        return Policy(reduce=torch.bfloat16)


def reduction(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """Gradients travel in the dtype that the precision's policy states: they come back rounded to it, and no more.

    Under a precision of the suite's own, float32 with ``reduce=torch.bfloat16``. Seen in the numbers, not on the wire,
    so whatever a strategy sends by is judged alike.
    """
    cell, recipe = replace(cell, precision=NarrowReduction), Recipe(samples=16, epochs=1)
    seen = against_reference(cell, pools, recipe, terms)
    exact = reference.train(recipe, cell.world_size, Dtypes()).first_gradients
    for one in seen:
        off = {n: float((one.first_gradients[n] - g).abs().max() / g.abs().max()) for n, g in exact.items()}
        assert max(off.values()) > ROUNDED, (
            "policy.reduce is torch.bfloat16, and gradients come back as exact as if they had travelled in float32. "
            "Cast what is sent to context.policy.reduce, and back"
        )


def unlike_layers(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """In each update each rank uses a layer that another does not, so that each has other gradients."""
    try:
        against_reference(cell, pools, Recipe(samples=16, epochs=1, unlike=True), terms)
    except TaskFailed as error:
        raise AssertionError(
            "ranks that used different layers did not get through an update. Agree which gradients exist before you "
            f"send them, or take 'unused_parameters' out of offers.\n{error}"
        ) from error


def skipping(cell: Cell, pools: Pools, terms: Terms = UNDECLARED) -> None:
    """With ``on_skip="samples"`` one rank's step returns None in the second update, which the others' samples make."""
    against_reference(cell, pools, Recipe(samples=24, epochs=1, skip_at=1), terms)


def _plain(dtypes: Dtypes) -> bool:
    return (dtypes.param, dtypes.compute, dtypes.reduce) == (torch.float32,) * 3 and dtypes.scaling is None


UNLIKE = {
    check.name: check
    for check in (
        Check(reduction, "several_processes", applies=_plain, sizes=(2,), precision=NarrowReduction),
        Check(unlike_layers, "unused_parameters", applies=_plain, sizes=(2,), only_offered=True),
        Check(skipping, "skip_samples", {"on_skip": "samples"}, sizes=(2,)),
    )
}
