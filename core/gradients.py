"""What is done to gradients between backward and the optimizer: average, measure, clip. In place.

Gradients may be plain tensors, `DTensor`s, or both in one list. What is elementwise is done to the parts that this rank
holds; a norm is put together over the ranks that share a tensor. torch's own functions refuse a list that holds both
kinds ("got mixed torch.Tensor and DTensor").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from .launch import alone
from .launch.world import World
from .layout import sharded


def parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """All parameters of these optimizers, each once, in the order of their groups."""
    found: dict[nn.Parameter, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(dict.fromkeys(group["params"]))
    return list(found)


def of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The gradients that exist, in the order of `parameters`."""
    return [p.grad for p in parameters(optimizers) if p.grad is not None]


def local(grads: Sequence[Tensor]) -> list[Tensor]:
    """The parts that this rank holds, sharing memory with the gradients; empty parts are left out."""
    parts = [grad if (found := sharded(grad)) is None else found.to_local() for grad in grads]
    return [part for part in parts if part.numel()]


def largest(grads: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of the elements on this rank; NaN and infinity come through, nothing can overflow."""
    parts = local(grads)
    return get_total_norm(parts, norm_type=float("inf")) if parts else torch.zeros(())


def multiply_(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply in place."""
    if parts := local(grads):
        torch._foreach_mul_(parts, factor)  # an underscore, but what torch's own optimizers are built of


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The global L2 norm, 0-dim. A collective where gradients are sharded: all ranks call it, with the same list."""
    kinds: dict[Any, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault(_sharing(grad), []).append(grad)
    if not kinds:
        return torch.zeros(())
    if list(kinds) == [None]:
        return get_total_norm(grads)
    norms: list[Tensor] = []
    for sharing, members in kinds.items():
        parts = local(members)
        # float32 at least: the squares of float16 overflow, and a sum over ranks must not round more than one process
        dtype = torch.promote_types(members[0].dtype, torch.float32)
        norm = get_total_norm(parts).to(dtype) if parts else torch.zeros((), dtype=dtype, device=members[0].device)
        if sharing is not None:
            mesh, dims = sharing
            square = norm**2
            for dim in dims:
                torch.distributed.all_reduce(square, group=mesh.get_group(dim))  # the ranks that share these tensors
            norm = square.sqrt()
        norms.append(norm)
    together: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].dtype) for norm in norms]))
    return together


def _sharing(grad: Tensor) -> Any:
    """With whom a gradient is shared: None for a plain tensor, else the mesh and its dimensions that cut the tensor."""
    found = sharded(grad)
    if found is None:
        return None
    if any(placement.is_partial() for placement in found.placements):
        raise TypeError(f"a gradient is not reduced yet: it has the placements {found.placements!r}.")
    return found.device_mesh, tuple(dim for dim, place in enumerate(found.placements) if place.is_shard())


def clip_(params: Sequence[nn.Parameter], value: float, algorithm: str) -> Tensor | None:
    """Clip in place; by ``"norm"`` return the global L2 norm before clipping, 0-dim (Pascanu et al. 2013)."""
    grads = [p.grad for p in params if p.grad is not None]
    if algorithm == "value":
        for part in local(grads):
            part.clamp_(-value, value)
        return None
    norm = total_norm(grads)
    multiply_(grads, torch.clamp(value / (norm + 1e-6), max=1.0))
    return norm


def average_(params: Sequence[nn.Parameter], world: World, dtype: torch.dtype | None = None) -> None:
    """Average over all ranks in one collective per dtype; all ranks take part with the same list of parameters.

    Gradients travel in ``dtype``, or in their own.

    A flag per parameter travels with the gradients: one that has no gradient on any rank stays without, one that has
    some takes zeros from the ranks where it has none.
    """
    if world.world_size == 1 or not params:
        return
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in params:
        if param.requires_grad:
            by_dtype.setdefault(param.dtype, []).append(param)
    for members in by_dtype.values():
        _average_one_dtype_(members, world.world_size, dtype)


def _average_one_dtype_(params: list[nn.Parameter], world_size: int, dtype: torch.dtype | None) -> None:
    has = [p.grad is not None for p in params]
    pieces = [params[0].new_tensor(has)] + [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([piece.detach().reshape(-1) for piece in pieces]).to(dtype or params[0].dtype)
    torch.distributed.all_reduce(flat)  # all ranks
    flags, *parts = torch.split(flat.to(params[0].dtype), [len(params)] + [p.numel() for p in params])
    somewhere = has if all(has) else flags.tolist()  # read on the host only where a gradient is missing
    for param, part, present in zip(params, parts, somewhere, strict=True):
        if present:
            average = part.view_as(param) / world_size
            if param.grad is None:
                param.grad = average
            else:
                param.grad.copy_(average)


def maximum_(flag: Tensor, world: World) -> Tensor:
    """The maximum over all ranks, in place."""
    if world.world_size > 1:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)  # all ranks
    return flag


def broadcast_(root: nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    if world.world_size > 1:
        for tensor in (*root.parameters(), *root.buffers()):
            torch.distributed.broadcast(tensor.detach(), 0)  # all ranks


def broadcast_together_(tensors: Sequence[Tensor]) -> None:
    """Give every rank rank 0's values of these tensors, in one collective per dtype. All ranks take part."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for members in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        torch.distributed.broadcast(flat, 0)  # all ranks
        for tensor, part in zip(members, torch.split(flat, [t.numel() for t in members]), strict=True):
            tensor.copy_(part.view_as(tensor))


def gather(data: Any, world: World, sync_grads: bool) -> Any:
    """Each tensor of ``data`` stacked over the ranks; see `Module.all_gather`. A collective for each: all ranks."""
    from lightning_utilities.core.apply_func import apply_to_collection

    alone.refuse("all_gather()")

    def one(tensor: Tensor) -> Tensor:
        if world.world_size == 1:
            return tensor.unsqueeze(0)
        if sync_grads and tensor.requires_grad:
            from torch.distributed.nn.functional import all_gather

            return torch.stack(list(all_gather(tensor.contiguous(), torch.distributed.group.WORLD)))  # type: ignore[no-untyped-call]
        parts = [torch.empty_like(tensor, requires_grad=False) for _ in range(world.world_size)]
        torch.distributed.all_gather(parts, tensor.detach().contiguous())
        return torch.stack(parts)

    return apply_to_collection(data, Tensor, one)
