"""The loss in what a step returned, and what to say of one that backward cannot be called on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError


def of_step(output: Any, device: torch.device) -> ConfigurationError | None:
    """The error for what ``training_step`` returned; None where the loss is not at fault."""
    return refused(output.get("loss") if isinstance(output, Mapping) else output, device, "training_step returned")


def refused(loss: Any, device: torch.device, what: str) -> ConfigurationError | None:
    """The error for a loss; ``what`` begins the sentence. None where it is not at fault."""
    if loss is None:
        return None
    if not isinstance(loss, Tensor):
        return ConfigurationError(
            f"{what} the loss {loss!r}, a {type(loss).__name__}; expected a 0-dim tensor with its graph. Give the "
            "tensor itself, without .item(), float() or numpy()."
        )
    if loss.numel() != 1:
        return ConfigurationError(
            f"{what} a loss of shape {tuple(loss.shape)}; expected one number, the mean over the batch. Reduce it, "
            "loss.mean(), or leave the criterion's reduction at 'mean'."
        )
    if not loss.requires_grad:
        return ConfigurationError(
            f"{what} a loss ({loss.dtype}) that depends on no parameter which requires a gradient: it was detached, "
            "computed under torch.no_grad, from integers (argmax, rounding) or from frozen layers alone. Return the "
            "loss that the trained layers gave, or None for a batch to skip."
        )
    if loss.device.type != device.type:
        return ConfigurationError(
            f"{what} a loss on {loss.device}, and the run is on {device}. Compute it there: make new tensors with "
            "device=self.device, and move none away."
        )
    return None


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a step returned beside a tensor or None: a mapping that names it. Raises ConfigurationError."""
    if not isinstance(output, Mapping) or "loss" not in output:
        found = f"a mapping with the keys {sorted(map(str, output))}" if isinstance(output, Mapping) else repr(output)
        raise ConfigurationError(
            f"training_step returned {found}; expected the loss as a tensor with its graph (without .item()), a "
            "mapping with it under 'loss', or None to skip."
        )
    loss: Tensor | None = output["loss"]
    return loss
