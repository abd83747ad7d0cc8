"""Dynamic loss scaling, carried out by the core so that it works under every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import gradients

if TYPE_CHECKING:
    from .plugins import Scaling


class LossScaler:
    """Multiplies the loss, divides the gradients, and skips updates that overflowed (Micikevicius et al. 2018).

    One scaler serves all optimizers: `update` is called once per update and backs off when any of them overflowed.
    """

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self.scale = float(scaling.initial)
        self.good_updates = 0
        self.overflowed = False

    def unscale_(self, grads: Sequence[Tensor], *, agree: Callable[[Tensor], Tensor]) -> bool:
        """Divide gradients by the scale in place; return whether all of them are finite on all ranks.

        ``agree`` takes the maximum of a 0-dim float tensor over all ranks. Reading its answer is the one host
        synchronisation of an update.
        """
        flag = agree((~torch.isfinite(gradients.largest(grads))).float())
        if flag.item():
            self.overflowed = True
            return False
        gradients.multiply_(grads, 1.0 / self.scale)
        return True

    def update(self) -> None:
        """Grow or back off, once after each update."""
        if self.overflowed:
            self.scale *= self.scaling.backoff
            self.good_updates = 0
        else:
            self.good_updates += 1
            if self.good_updates == self.scaling.interval:
                self.scale *= self.scaling.growth
                self.good_updates = 0
        self.overflowed = False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_updates": self.good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_updates = float(state["scale"]), int(state["good_updates"])
