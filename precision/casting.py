"""Casting the floating tensors of a batch."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def cast_floating(batch: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a batch; integers, booleans and complex numbers stay as they are."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
