"""Small choices that several precisions have."""

from __future__ import annotations

import torch
from trivet.errors import ConfigurationError

MATMUL = (None, "highest", "high", "medium")


def check_matmul(name: str, matmul: str | None) -> None:
    """Raise ConfigurationError unless torch has such float32 products."""
    if matmul not in MATMUL:
        raise ConfigurationError(
            f"{name}: matmul={matmul!r} is unknown; allowed are highest (float32), high (TF32 or three bfloat16 "
            "products), medium (bfloat16), as torch.set_float32_matmul_precision has them, and None."
        )


def wire(name: str, reduce: str, low: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are communicated."""
    known = {"float32": torch.float32, str(low).removeprefix("torch."): low}
    if reduce not in known:
        raise ConfigurationError(f"{name}: reduce={reduce!r} is unknown; allowed are {', '.join(known)}.")
    return known[reduce]
