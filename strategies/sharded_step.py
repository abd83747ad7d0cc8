"""Optimizers over sharded parameters: what torch's DTensor cannot do is stepped in parts, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from trivet.errors import ConfigurationError

# elementwise ones that DTensor has no form of: Rprop assigns by a mask
IN_PARTS = (torch.optim.Rprop,)
# what torch says of an operation without one
WITHOUT_FORM = ("placement changes are not supported", "sharding strategy", "mixed torch.Tensor and DTensor")


@contextmanager
def refusals(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Say which optimizer it was that DTensor has no form of. Raises ConfigurationError."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if not any(text in str(error) for text in WITHOUT_FORM):
            raise
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ConfigurationError(
            f"{names} does with sharded parameters what torch's DTensor cannot do: {error} Use an elementwise "
            "optimizer such as AdamW, or --strategy ddp."
        ) from error


def adapt(optimizer: Optimizer) -> None:
    """Let some step parts: within ``step``, parameters, gradients and state are this rank's, in the same memory."""
    if not isinstance(optimizer, IN_PARTS):
        return
    whole: list[list[nn.Parameter]] = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        whole[:] = [group["params"] for group in optimizer.param_groups]
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [_part(optimizer, param) for param in params]

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            for part, param in zip(group["params"], params, strict=True):
                if part is not param and part in optimizer.state:
                    state = optimizer.state.pop(part)
                    optimizer.state[param] = {key: _like(value, part, param) for key, value in state.items()}
            group["params"] = params

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _part(optimizer: Optimizer, param: nn.Parameter) -> nn.Parameter:
    held = param.detach()
    if not isinstance(held, DTensor):
        return param
    part = nn.Parameter(held.to_local(), param.requires_grad)
    part.grad = param.grad.to_local() if isinstance(param.grad, DTensor) else None
    if param in optimizer.state:
        state = optimizer.state.pop(param)
        optimizer.state[part] = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}
    return part


def _like(value: Any, part: Tensor, param: Tensor) -> Any:
    held = param.detach()
    if not (isinstance(held, DTensor) and isinstance(value, Tensor) and value.dim() and value.shape == part.shape):
        return value
    return DTensor.from_local(
        value, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
