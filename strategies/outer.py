"""The outer optimizer of DiLoCo: it steps on how far the ranks came, on average, since they last met."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD


class Outer:
    """SGD with Nesterov momentum on anchors, the weights that all ranks began with.

    Algorithm 1 of Douillard et al. 2023. Anchors are copies in float32 at least. Every rank makes the same steps on the
    same numbers: nothing is sent.
    """

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.anchors: dict[str, nn.Parameter] = {}
        self.optimizer: SGD | None = None

    @torch.no_grad()
    def begin(self, params: Mapping[str, nn.Parameter], state: Mapping[str, Tensor]) -> None:
        """Take anchors and momenta of those that require gradients from ``state``, else anchors from the weights."""
        self.anchors = {}
        for name, param in params.items():
            if param.requires_grad:
                dtype = torch.promote_types(param.dtype, torch.float32)
                start = state.get(f"anchor/{name}", param)
                self.anchors[name] = nn.Parameter(start.detach().to(param.device, dtype, copy=True))
        if not self.anchors:
            return
        self.optimizer = SGD(self.anchors.values(), self.lr, self.momentum, nesterov=self.momentum > 0)
        for name, anchor in self.anchors.items():
            if (momentum := state.get(f"momentum/{name}")) is not None:
                self.optimizer.state[anchor]["momentum_buffer"] = momentum.to(anchor.device, anchor.dtype)

    @torch.no_grad()
    def step_(self, params: Mapping[str, nn.Parameter]) -> None:
        """Make of averaged parameters those that all ranks go on from."""
        if self.optimizer is None:
            return
        for name, anchor in self.anchors.items():
            began = anchor.to(params[name].dtype)  # as the ranks saw it
            anchor.grad = began.to(anchor.dtype) - params[name]
        self.optimizer.step()
        for name, anchor in self.anchors.items():
            params[name].copy_(anchor)
            anchor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Anchors and momenta, the same on all ranks."""
        found = {f"anchor/{name}": anchor.detach() for name, anchor in self.anchors.items()}
        states = self.optimizer.state if self.optimizer is not None else {}
        for name, anchor in self.anchors.items():
            if (momentum := states.get(anchor, {}).get("momentum_buffer")) is not None:
                found[f"momentum/{name}"] = momentum
        return found
