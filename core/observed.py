"""What one update really did, as torch dispatched it: the dtypes of matrix products, and of what ranks add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .torch_compat import TorchDispatchMode

PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution", "_scaled_mm")
)
SUMS = (
    "c10d::allreduce_", "c10d::allreduce_coalesced_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_",
    "c10d::reduce_scatter_tensor_coalesced_", "_c10d_functional::all_reduce", "_c10d_functional::all_reduce_",
    "_c10d_functional::all_reduce_coalesced", "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::reduce_scatter_tensor_coalesced",
)  # fmt: skip


class Observed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts, by dtype, matrix products and the elements that ranks added up with one another.

    Backward is seen too, on whatever thread it runs, and so are collectives that are called in C++, as DDP's are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: Counter[torch.dtype] = Counter()
        self.added: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, name = func(*args, **(kwargs or {})), func.name().partition(".")[0]
        if name in PRODUCTS:
            self.products.update(tensor.dtype for tensor in floats(output))
        elif name in SUMS:
            for tensor in floats(args):
                self.added[tensor.dtype] += tensor.numel()
        return output


def floats(found: Any) -> Iterator[Tensor]:
    """The floating tensors in lists and tuples."""
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, (list, tuple)):
        for part in found:
            yield from floats(part)
