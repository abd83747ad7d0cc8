"""Gathering tensors that differ in length among ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
DIMS = 8


def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """The tensor of each rank, whatever their shapes. All ranks of the group call it; the shapes are read on the host.

    What metrics of torchmetrics are given as ``dist_sync_fn``: its own crashes a process under gloo where a rank that
    had no batch brings an empty tensor of another dtype.
    """
    if tensor.ndim > DIMS or tensor.dtype not in DTYPES:
        raise TypeError(f"a metric's state of dtype {tensor.dtype} with {tensor.ndim} dimensions cannot be gathered.")
    world_size = dist.get_world_size(group)
    shape = list(tensor.shape)
    head = torch.tensor([DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (DIMS - len(shape))])
    heads = [torch.empty_like(head, device=tensor.device) for _ in range(world_size)]
    dist.all_gather(heads, head.to(tensor.device), group)  # all ranks
    rows = torch.stack(heads).tolist()
    shapes = [tuple(row[2 : 2 + row[1]]) for row in rows]
    sizes = [torch.Size(one).numel() for one in shapes]
    filled = {row[0] for row, size in zip(rows, sizes, strict=True) if size} or {rows[0][0]}
    if len(filled) > 1:
        raise TypeError(f"ranks hold a metric's state in different dtypes: {[DTYPES[i] for i in sorted(filled)]}.")
    dtype = DTYPES[filled.pop()]
    flat = torch.zeros(max(sizes), dtype=dtype, device=tensor.device)
    flat[: tensor.numel()] = tensor.detach().flatten().to(dtype)
    parts = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(parts, flat, group)  # all ranks
    return [part[:size].reshape(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)]
