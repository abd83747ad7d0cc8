"""PowerSGD: gradients of matrices travel as products of two thin ones, and what was lost is added to the next."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trivet import gradients
from trivet.plugins import Context, OwnState

WORTH = 2  # a matrix is compressed if that sends less than one part in so many, as in torch's hook


class PowerSGD:
    """Algorithms 1 and 2 of Vogels et al. 2019, with warm start. Every rank makes one.

    Why not torch's hook: its later collectives start in callbacks, whose order gloo does not keep once there are two
    buckets, and its memory belongs to buckets, which change.
    """

    def __init__(self, context: Context, rank: int, start: int) -> None:
        self.context, self.rank, self.start = context, rank, start
        self.steps = 0
        self.errors: dict[nn.Parameter, Tensor] = {}  # of this rank
        self.factors: dict[nn.Parameter, Tensor] = {}  # Q of the paper, the same on all ranks

    @torch.no_grad()
    def reduce_(self, params: Sequence[nn.Parameter], places: dict[nn.Parameter, int]) -> None:
        """Average gradients over all ranks, about. All ranks call it with the same parameters.

        ``places`` number a module's parameters: the first factors are drawn by them. A parameter that no rank has a
        gradient of keeps its error for later.
        """
        self.steps += 1
        large = [p for p in params if p.requires_grad and self._width(p)] if self.steps > self.start else []
        apart = set(large)
        gradients.average_([p for p in params if p not in apart], self.context.world, self.context.policy.reduce)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in _somewhere(large):
            by_dtype.setdefault(param.dtype, []).append(param)
        for members in by_dtype.values():
            for param in members:
                self._prepare(param, places[param])
            self._compress(members)

    def _width(self, param: Tensor) -> int:
        """Columns of the factors, 0 where they would not be worth it."""
        if param.dim() < 2 or not param.numel():
            return 0
        rows = param.shape[0]
        columns = param.numel() // rows
        width = min(rows, columns, self.rank)
        return width if WORTH * width * (rows + columns) < rows * columns else 0

    def _prepare(self, param: nn.Parameter, place: int) -> None:
        """Make of the error what has to travel, and see that there is a factor."""
        dtype, shape = torch.promote_types(param.dtype, torch.float32), (param.shape[0], -1)
        if param not in self.errors:
            self.errors[param] = torch.zeros_like(param, dtype=dtype).reshape(shape)
        if param not in self.factors:
            size = (self.errors[param].shape[1], self._width(param))
            drawn = torch.randn(size, generator=torch.Generator().manual_seed(place), dtype=dtype)
            self.factors[param] = drawn.to(param.device)
        if param.grad is None:
            param.grad = torch.zeros_like(param)  # another rank has one
        self.errors[param] += param.grad.reshape(shape)

    def _compress(self, params: list[nn.Parameter]) -> None:
        sent = [self.errors[param] for param in params]
        left = _sum([m @ self.factors[p] for p, m in zip(params, sent, strict=True)])
        left = [torch.linalg.qr(p).Q for p in left]  # of a zero gradient, too, something finite
        right = _sum([m.T @ p for m, p in zip(sent, left, strict=True)])
        for param, matrix, p, q in zip(params, sent, left, right, strict=True):
            q /= self.context.world.world_size
            self.factors[param] = q
            average = p @ q.T
            assert param.grad is not None
            param.grad.copy_(average.view_as(param))
            matrix -= average

    # ------------------------------------------------------------------------------------------------- checkpoints

    def state(self, names: dict[nn.Parameter, str]) -> OwnState:
        """What the next step needs: each rank's errors, and everybody's factors."""
        factors = {f"powersgd/factor/{names[param]}": factor for param, factor in self.factors.items()}
        errors = {f"powersgd/error/{names[param]}": error for param, error in self.errors.items()}
        return OwnState({"powersgd/steps": torch.tensor(self.steps), **factors}, errors)

    def load(self, state: OwnState, names: dict[nn.Parameter, str]) -> bool:
        """The reverse of `state`; whether there was any."""
        if "powersgd/steps" not in state.alike:
            return False
        self.steps = int(state.alike["powersgd/steps"])
        here = self.context.world.world_size
        if state.world_size != here:
            warnings.warn(
                f"ddp: the checkpoint holds PowerSGD's errors of {state.world_size} ranks, and there are {here}: they "
                "are dropped, and what was not sent yet is lost.",
                stacklevel=2,
            )
        for param, name in names.items():
            if (error := state.apart.get(f"powersgd/error/{name}")) is not None:
                self.errors[param] = error.to(param.device)
            factor = state.alike.get(f"powersgd/factor/{name}")
            if factor is not None and factor.shape[1] == self._width(param):  # it may have another rank now
                self.factors[param] = factor.to(param.device)
        return True


def _somewhere(params: Sequence[nn.Parameter]) -> Iterable[nn.Parameter]:
    """Those that some rank has a gradient of. A collective if there are any: all ranks."""
    if not params:
        return ()
    has = [param.grad is not None for param in params]
    flags = torch.tensor(has, dtype=torch.uint8, device=params[0].device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)  # all ranks
    found = has if all(has) else flags.tolist()  # read on the host only where a gradient is missing
    return [param for param, there in zip(params, found, strict=True) if there]


def _sum(matrices: list[Tensor]) -> list[Tensor]:
    """The sum over ranks of each, in one collective. All ranks."""
    flat = torch.cat([matrix.reshape(-1) for matrix in matrices])
    dist.all_reduce(flat)  # all ranks
    parts = torch.split(flat, [matrix.numel() for matrix in matrices])
    return [part.view_as(matrix) for part, matrix in zip(parts, matrices, strict=True)]
