"""What is done to gradients between backward and the optimizer: average, measure, clip. In place, on plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from .launch.world import World


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


def largest(grads: Sequence[Tensor]) -> Tensor:
    """The largest absolute value of all elements, 0-dim; NaN and infinity come through, nothing can overflow."""
    return get_total_norm(grads, norm_type=float("inf")) if grads else torch.zeros(())


def multiply_(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply in place."""
    if grads:
        torch._foreach_mul_(list(grads), factor)  # an underscore, but what torch's own optimizers are built of


def clip_(params: Sequence[nn.Parameter], value: float, algorithm: str) -> Tensor | None:
    """Clip in place; by ``"norm"`` return the global L2 norm before clipping, 0-dim (Pascanu et al. 2013)."""
    if algorithm == "value":
        clip_grad_value_(params, value)
        return None
    grads = [p.grad for p in params if p.grad is not None]
    norm = get_total_norm(grads) if grads else torch.zeros(())
    clip_grads_with_norm_(params, value, norm)
    return norm


def average_(params: Sequence[nn.Parameter], world: World) -> None:
    """Average over all ranks in one collective per dtype; all ranks take part with the same list of parameters.

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
        _average_one_dtype_(members, world.world_size)


def _average_one_dtype_(params: list[nn.Parameter], world_size: int) -> None:
    has = [p.grad is not None for p in params]
    pieces = [params[0].new_tensor(has)] + [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([piece.detach().reshape(-1) for piece in pieces])
    torch.distributed.all_reduce(flat)  # all ranks
    flags, *parts = torch.split(flat, [len(params)] + [p.numel() for p in params])
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
