"""Flat vectors of parameters, cut into one slice per rank of the same size to an element: what ZeRO is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trivet.errors import ConfigurationError

# torch 2.13 renamed them and warns of the old names
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# devices whose backend (gloo) has no reduce-scatter: torch makes one of an all-reduce, which sends twice as much
EXCHANGED = {"cpu"}

# which of a tensor's elements, in row-major order, each rank holds: (from, to) by rank, ascending
Ranges = list[tuple[int, int]]


class Bucket:
    """Parameters of one dtype that are communicated together.

    Their elements, one parameter after the other, are ``vector``, of ``world_size`` slices; rank r holds the r-th of
    the gradients and updates the r-th of the parameters. At most ``world_size - 1`` elements of padding are held and
    sent.
    From here on the parameters are views into the vector, contiguous; `leave` gives each memory of its own.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], rank: int, world_size: int, wire: torch.dtype | None = None
    ) -> None:
        self.params, self.rank, self.world_size = list(params), rank, world_size
        self.wire = wire or params[0].dtype  # of gradients while they are sent
        sizes = [param.numel() for param in params]
        starts = [0, *accumulate(sizes)]
        self.slice_size = size = -(-starts[-1] // world_size)
        self.padding = params[0].new_zeros(size * world_size - starts[-1])
        self.ranges = [self._cut(start, size) for start, size in zip(starts, sizes, strict=False)]
        self.vector = torch.cat([*(param.detach().reshape(-1) for param in params), self.padding])
        self.mine = self.vector[rank * size : (rank + 1) * size]
        ends = zip(starts, starts[1:], params, strict=False)
        self.wholes = [self.vector[low:high].view(param.shape) for low, high, param in ends]
        self.lengths = [b - a for a, b in (ranges[rank] for ranges in self.ranges)]
        self.lengths.append(size - sum(self.lengths))
        self.parts = torch.split(self.mine, self.lengths)[:-1]  # of the parameters, what this rank updates
        self.mean: Tensor | None = None  # this rank's slice of the gradients that are reduced so far
        self.present = [False] * len(self.params)  # whether a parameter had a gradient on this rank
        self.waiting = len(self.params)  # parameters without gradient in the backward that runs
        self.exchanged = self.vector.device.type in EXCHANGED
        sent = self.vector.numel() * self.wire.itemsize
        self.room = self.vector.nbytes + (sent if self.exchanged else 0)  # bytes that `reduce` works in
        self._flight: tuple[Any, Tensor, Tensor] | None = None
        for param, whole in zip(self.params, self.wholes, strict=True):
            param.data = whole

    def _cut(self, start: int, size: int) -> Ranges:
        edges = [min(max(rank * self.slice_size - start, 0), size) for rank in range(self.world_size)]
        return list(zip(edges, [*edges[1:], size], strict=True))

    def leave(self) -> None:
        """Give each parameter memory of its own."""
        for param in self.params:
            param.data = param.data.clone()

    def note(self) -> None:
        """Note which parameters have a gradient."""
        self.present = [before or p.grad is not None for before, p in zip(self.present, self.params, strict=True)]

    def reduce(self, room: Tensor) -> None:
        """Start to average the gradients into this rank's slice, and let go of them. All ranks, in the same order.

        They are sent from the memory ``room``, of at least ``self.room`` bytes; it is free again when `wait` returns.
        """
        self.note()
        grads = [param.grad for param in self.params]
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            raise ConfigurationError("zero cannot cut sparse gradients: make the embedding with sparse=False.")
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, grads, strict=True)]
        flat = room[: self.vector.nbytes].view(self.vector.dtype)
        torch.cat([*(piece.detach().reshape(-1) for piece in pieces), self.padding], out=flat)
        for param in self.params:
            param.grad = None
        flat = flat.div_(self.world_size).to(self.wire)  # before the sum, which float16 might not hold
        if self.exchanged:
            got = room[self.vector.nbytes : self.room].view(self.wire).view(self.world_size, -1)
            work = dist.all_to_all_single(got.view(-1), flat, async_op=True)  # all ranks
        else:
            got = flat.new_empty(1, self.slice_size)
            work = reduce_scatter(got[0], flat, async_op=True)  # all ranks
        self._flight = work, got, flat

    def wait(self) -> None:
        """Wait for `reduce` and add its answer to what earlier micro-batches left."""
        if self._flight is not None:
            work, got, _ = self._flight
            work.wait()
            mine = got.sum(0, dtype=self.vector.dtype) if self.exchanged else got[0].to(self.vector.dtype)
            self.mean = mine if self.mean is None else self.mean.add_(mine)
            self._flight, self.waiting = None, len(self.params)

    def clear(self) -> None:
        """Forget the gradients that are reduced."""
        self.mean, self.present = None, [False] * len(self.params)

    def cut_(self, present: Iterable[bool]) -> None:
        """Let each parameter and its gradient be this rank's slice, 1-D; None where no rank had a gradient."""
        assert self.mean is not None
        grads = torch.split(self.mean, self.lengths)
        for param, whole, part, grad, there in zip(self.params, self.wholes, self.parts, grads, present, strict=False):
            if param.data_ptr() != whole.data_ptr():  # somebody gave it other memory
                whole.copy_(param.detach())
            param.data, param.grad = part, grad if there else None

    def join_(self, *, gather: bool) -> None:
        """Undo `cut_`; with ``gather`` (a collective) with what the ranks made of their slices."""
        for param, whole in zip(self.params, self.wholes, strict=True):
            param.data, param.grad = whole, None
        if gather:
            all_gather(self.vector, self.mine)  # all ranks; in place
            torch.autograd.graph.increment_version(self.params)  # autograd shall know that they changed


def buckets(
    params: Iterable[nn.Parameter], bytes_each: float, rank: int, world_size: int, wire: torch.dtype | None = None
) -> list[Bucket]:
    """Cut a list of parameters into buckets of one dtype and of at most ``bytes_each``, or one parameter."""
    found: list[list[nn.Parameter]] = []
    open_ones: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for param in params:
        members, filled = open_ones.get(param.dtype, ([], 0))
        size = param.numel() * param.element_size()
        if not members or filled + size > bytes_each:
            members, filled = [], 0
            found.append(members)
        members.append(param)
        open_ones[param.dtype] = members, filled + size
    return [Bucket(members, rank, world_size, wire) for members in found]


def rows(shape: Sequence[int], world_size: int) -> Ranges:
    """What ``Shard(0)`` of a DTensor gives each rank; the whole of a scalar."""
    if not shape:
        return [(0, 1)] * world_size
    row = 1
    for size in shape[1:]:
        row *= size
    most = -(-shape[0] // world_size)
    edges = [min(rank * most, shape[0]) * row for rank in range(world_size + 1)]
    return list(pairwise(edges))


def move(part: Tensor, source: Ranges, target: Ranges, rank: int) -> Tensor:
    """Exchange parts of a flat tensor, so that ranks which hold ``source`` hold ``target``. A collective."""
    a, _ = source[rank]
    shared = [(max(source[rank][0], low), min(source[rank][1], high)) for low, high in target]
    pieces = [part[low - a : high - a] if low < high else part[:0] for low, high in shared]
    low, high = target[rank]
    sizes = [max(0, min(b, high) - max(a, low)) for a, b in source]
    answer = part.new_empty(sum(sizes))
    dist.all_to_all_single(answer, torch.cat(pieces), sizes, [p.numel() for p in pieces])  # all ranks
    return answer
