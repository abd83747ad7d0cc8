"""How far a run may be from the reference: by the dtypes that a precision names, or as a suite states it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .reference import Dtypes


@dataclass(frozen=True)
class Tolerance:
    """How far a run may be from the reference, as a part of the largest element of what is compared.

    ``first_loss`` is computed from the same weights, so only matrix products of other shapes make a difference there.
    ``losses`` are those of all updates, ``gradients`` the first update's. ``weights`` are the last ones; None where
    rounding decides over them, so that losses and first gradients are compared alone.
    """

    first_loss: float
    losses: float
    gradients: float
    weights: float | None = None


def wider(one: Tolerance, other: Tolerance) -> Tolerance:
    """What either allows."""
    weights = None if one.weights is None or other.weights is None else max(one.weights, other.weights)
    return Tolerance(
        max(one.first_loss, other.first_loss),
        max(one.losses, other.losses),
        max(one.gradients, other.gradients),
        weights,
    )


# about three times what was seen over all cells, and for float32 and float64 what Trivet promises
TOLERANCES = {
    (torch.float64, torch.float64): Tolerance(1e-14, 1e-12, 1e-13, 1e-12),
    (torch.float32, torch.float32): Tolerance(5e-7, 1e-6, 1e-6, 1e-6),
    (torch.float32, torch.bfloat16): Tolerance(1e-6, 2e-3, 2e-2, None),
    (torch.float32, torch.float16): Tolerance(1e-6, 5e-4, 2e-3, None),
    (torch.bfloat16, torch.bfloat16): Tolerance(1e-2, 2e-2, 2e-2, None),
    (torch.float16, torch.float16): Tolerance(2e-3, 2e-3, 4e-3, None),
}


@dataclass(frozen=True)
class Terms:
    """What a suite declares of its plugin, and so what its checks hold it to.

    ``tolerance`` is used where it is wider than that of the dtypes. ``synchronises_every``: more than 1 says that ranks
    differ between, by design; what is checked then stands in `trivet.testing.apart`.
    """

    tolerance: Tolerance | None = None
    synchronises_every: int = 1
    timeout_s: float = 60.0

    def bounds(self, dtypes: Dtypes) -> Tolerance:
        """The tolerance for these dtypes, widened by that of a narrower one on the way, and by the declared one."""
        found, own = TOLERANCES.get((dtypes.param, dtypes.compute)), self.tolerance
        sent = TOLERANCES.get((dtypes.param, dtypes.reduce or dtypes.param))
        if found is not None and sent is not None:
            found = wider(found, sent)
        if own is None or found is None:
            bounds = own or found
            assert bounds is not None, (
                f"no tolerance is known for {dtypes.param} with {dtypes.compute}: state one in the suite's `tolerance`"
            )
            return bounds
        return wider(found, own)

    def note(self) -> str:
        """What the table says of the declaration; empty where there is none."""
        notes = ["own tolerance"] if self.tolerance is not None else []
        if self.synchronises_every > 1:
            notes.append(f"ranks apart, every {self.synchronises_every} updates alike")
        return ", ".join(notes)


UNDECLARED = Terms()
