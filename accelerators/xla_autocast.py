"""Operations that torch's autocast table keeps in float32 and torch_xla's leaves out.

Under ``torch.autocast("xla", torch.bfloat16)`` torch_xla 2.9 computes them in bfloat16 where their input is: a root
mean square norm, a sum of squares, Huber's loss. They are registered with torch for the dispatch key of that autocast,
which is what torch's public `torch.library` is for; outside of autocast nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

KEY = "AutocastXLA"
# what torch's table for CUDA has (docs: "CUDA Ops that can autocast to float32") and torch_xla's has not; rms_norm, in
# neither, is treated as the other norms
NAMES = """
    layer_norm native_layer_norm group_norm rms_norm renorm
    norm.Scalar norm.ScalarOpt_dim linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
    frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist
    huber_loss poisson_nll_loss
    sum sum.dim_IntList cumsum cumprod logsumexp
    exp expm1 log log10 log2 log1p softplus reciprocal rsqrt pow.Scalar pow.Tensor_Tensor
    acos asin cosh sinh tan erfinv
"""

_library: torch.library.Library | None = None


def complete() -> None:
    """Add what is missing, once in a process. torch_xla is imported already."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # what it registers lives as long as it
    for name in NAMES.split():
        packet, _, overload = name.partition(".")
        _library.impl(name, _in_float32(getattr(getattr(torch.ops.aten, packet), overload or "default")), KEY)  # type: ignore[no-untyped-call]


def _in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = apply_to_collection((args, kwargs), Tensor, _widened)
        with torch.autocast("xla", enabled=False):
            return operation(*args, **kwargs)

    return computed


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
