"""Casting a module's storage."""

from __future__ import annotations

import torch
from torch import nn


def cast_(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters, their gradients and floating buffers in place; complex and integer ones stay.

    Not ``Module.to(dtype)``, which casts complex tensors too and drops their imaginary part. Assigning ``data`` keeps
    each parameter's identity, and so ties between them.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() and tensor.dtype != dtype:
            gradient, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None if gradient is None else gradient.to(dtype)
