"""ZeRO: ranks share the optimizer state (stage 1) and the gradients (stage 2) among them; parameters stay whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from trivet import gradients
from trivet.errors import ConfigurationError, TrivetError
from trivet.plugins import Clip, Context, MicroBatch, StepResult, Strategy
from trivet.scaling import LossScaler
from trivet.strategies import elementwise
from trivet.strategies.slices import Bucket, Ranges, buckets, move, rows


@dataclass
class Layout:
    """How one optimizer's parameters are cut: ``known`` is what `refresh` compares with."""

    buckets: list[Bucket] = field(default_factory=list)
    ranges: dict[nn.Parameter, Ranges] = field(default_factory=dict)
    shapes: dict[nn.Parameter, torch.Size] = field(default_factory=dict)
    known: list[tuple[int, bool]] = field(default_factory=list)


class Zero(Strategy):
    """ZeRO stage 1 or 2 (Rajbhandari et al. 2020, section 5): each rank updates its slice of the parameters.

    An update reduce-scatters the gradients and all-gathers the parameters, which together is DDP's all-reduce. Within
    the optimizer's step, and in ``on_before_optimizer_step``, parameters and their gradients are this rank's flat
    slices; everywhere else parameters are whole. `from_optimizer` shows a slice as a DTensor of the parameter's shape.

    Args:
        stage: 1 shares the optimizer state and reduces gradients once per update. 2 reduces them in the backward pass
            of every micro-batch, so that no rank holds more than a bucket of whole gradients.
        bucket_size_mb: gradients and parameters are communicated in buckets of about this size, in MiB.
        elementwise: promise that an optimizer which Trivet does not know treats each element of a parameter by itself.
        broadcast_buffers: give all ranks the buffers of rank 0 before each update.
    """

    def __init__(
        self,
        stage: int = 1,
        bucket_size_mb: float = 25.0,
        elementwise: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        if stage not in (1, 2):
            raise ConfigurationError(
                f"zero: stage={stage!r} is unknown; this class has 1 and 2, and --strategy zero3 is the third."
            )
        if bucket_size_mb <= 0:
            raise ConfigurationError(f"zero: bucket_size_mb={bucket_size_mb!r} must be positive.")
        self.stage = stage
        self.bucket_size_mb = bucket_size_mb
        self.elementwise = elementwise
        self.broadcast_buffers = broadcast_buffers
        self._layouts: dict[Optimizer, Layout] = {}
        self._handles: list[RemovableHandle] = []
        self._order: list[Bucket] = []  # of all optimizers, as backward fills them
        self._next = 0  # the bucket that is reduced next in this backward: all ranks keep the same order
        self._last = True  # whether this backward is the update's last
        self._asked: Flags | None = None
        self._rooms: list[Tensor] = []  # for two buckets on their way; fresh memory costs as much as the copy itself
        self._mesh: Any = None

    def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
        if world_size == 1:
            return (
                f"zero stage {self.stage} with one process: nothing is sharded, it trains like single; "
                "--devices 2 (or more) shares the optimizer state",
            )
        share = f"zero stage {self.stage}: each of {world_size} ranks holds 1/{world_size} of the optimizer state"
        if self.stage == 2:
            share += " and of the gradients, which are reduced in every micro-batch, also when accumulating"
        return (f"{share}; each bucket of parameters is padded to a multiple of {world_size} elements",)

    # ------------------------------------------------------------------------------------------------------ layout

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        self._layouts, self._mesh = {}, None
        root = super().shard(root, context)
        self.context = context  # in which the default has set ``late``, since it reduces at the step
        return root

    @property
    def _shares(self) -> bool:
        return self.context.world.world_size > 1

    @property
    def _in_backward(self) -> bool:
        """Whether gradients are reduced while backward runs; under ``late`` they are complete only at the step."""
        return self.stage == 2 and self._shares and not self.context.late

    def wrap_optimizer(self, root: nn.Module, optimizer: Optimizer) -> None:
        elementwise.check(optimizer, promised=self.elementwise)
        if self._shares:
            self._layouts[optimizer] = Layout()
            self._lay_out(optimizer)

    def _lay_out(self, optimizer: Optimizer) -> None:
        """Cut the parameters that require gradients; state that is there moves to where its slice is now."""
        layout, world = self._layouts[optimizer], self.context.world
        params = gradients.parameters([optimizer])
        layout.known = _signature(params)
        trainable = [param for param in reversed(params) if param.requires_grad]  # as backward finishes them
        for bucket in layout.buckets:
            bucket.leave()
        size, policy = self.bucket_size_mb * 2**20, self.context.policy
        wire = None if policy.reduce == policy.param else policy.reduce
        layout.buckets = buckets(trainable, size, world.rank, world.world_size, wire)
        for bucket in layout.buckets:
            for param, ranges in zip(bucket.params, bucket.ranges, strict=True):
                before = layout.ranges.get(param)
                layout.ranges[param], layout.shapes[param] = ranges, param.shape
                for key, value in optimizer.state.get(param, {}).items():
                    if before is None:
                        optimizer.state[param][key] = self.to_optimizer(optimizer, param, key, value)
                    elif self._is_slice(value, key, before):
                        optimizer.state[param][key] = move(value, before, ranges, world.rank)
        self._watch()

    def _watch(self) -> None:
        """Reduce in backward: know of every gradient that is there."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._next, self._rooms = [], 0, []
        self._order = [bucket for layout in self._layouts.values() for bucket in layout.buckets]
        if self._in_backward:
            for bucket in self._order:
                for param in bucket.params:
                    watch: Any = param.register_post_accumulate_grad_hook  # which torch leaves untyped
                    self._handles.append(watch(partial(self._ready, bucket)))

    def refresh(self, root: nn.Module) -> nn.Module:
        """Lay out anew, on all ranks, when parameters of an optimizer were frozen, unfrozen or added."""
        changed = [o for o, layout in self._layouts.items() if layout.known != _signature(gradients.parameters([o]))]
        if changed:
            names = {param: name.removeprefix("module.") for name, param in root.named_parameters()}
            known = {entry for optimizer in changed for entry in self._layouts[optimizer].known}
            params = gradients.parameters(changed)
            odd = [names.get(p, "?") for p in params if (id(p), p.requires_grad) not in known]
            self.context.same_on_all_ranks("parameters were frozen, unfrozen or added", odd)
            for optimizer in changed:
                self._lay_out(optimizer)
        return root

    def release(self, root: nn.Module) -> None:
        for layout in self._layouts.values():
            for bucket in layout.buckets:
                bucket.leave()

    def teardown(self, root: nn.Module) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._order, self._rooms, self._layouts = [], [], [], {}

    # ------------------------------------------------------------------------------------------------------ update

    def forward_backward(self, root: nn.Module, batches: Iterable[MicroBatch], scale: float | None) -> None:
        if self.broadcast_buffers and self._shares:
            _broadcast_together(list(root.buffers()))
        if self._in_backward:
            self._asked = None
            for bucket in self._order:
                bucket.clear()
        super().forward_backward(root, batches, scale)

    def one_batch(self, root: nn.Module, micro: MicroBatch, scale: float | None) -> None:
        self._last = micro.last
        super().one_batch(root, micro, scale)

    def backward(self, root: nn.Module, loss: Tensor) -> None:
        super().backward(root, loss)
        if self._in_backward:
            self._finish_backward()

    def _ready(self, bucket: Bucket, param: Tensor) -> None:
        """A parameter has its gradient: reduce the buckets that are full, in the order that all ranks keep."""
        bucket.waiting -= 1
        while self._next < len(self._order) and self._order[self._next].waiting <= 0:
            self._reduce_next()

    def _reduce_next(self) -> None:
        if self._next:
            self._order[self._next - 1].wait()  # so that whole gradients of one bucket are there, not of all
        self._reduce(self._order[self._next], 0)
        self._next += 1

    def _reduce(self, bucket: Bucket, number: int) -> None:
        """Start to reduce a bucket from the room of this number, which no other has on its way."""
        while len(self._rooms) <= number:
            size = max(each.room for each in self._order)
            self._rooms.append(torch.empty(size, dtype=torch.uint8, device=bucket.vector.device))
        bucket.reduce(self._rooms[number])

    def _finish_backward(self) -> None:
        """Reduce what some parameter had no gradient for, and wait. All ranks."""
        while self._next < len(self._order):
            self._reduce_next()
        if self._last:
            self._asked = Flags(self._order, self.context.device)
        if self._next:
            self._order[self._next - 1].wait()
        self._next = 0
        if any(param.grad is not None for bucket in self._order for param in bucket.params):
            raise TrivetError(
                "zero stage 2: a parameter got its gradient in several pieces within one backward, after the first was "
                "reduced. Use checkpoint(..., use_reentrant=False), or --strategy zero1."
            )

    def optimizer_step(
        self,
        root: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        clip: Clip | None,
        scaler: LossScaler | None,
        before_step: Callable[[Optimizer], None] | None = None,
    ) -> StepResult:
        mine = [bucket for optimizer in optimizers for bucket in self._layouts.get(optimizer, Layout()).buckets]
        with self._cut(mine) as outcome:
            result = super().optimizer_step(root, optimizers, clip=clip, scaler=scaler, before_step=before_step)
            outcome["applied"] = result.applied
        return result

    @contextmanager
    def _cut(self, mine: list[Bucket]) -> Iterator[dict[str, bool]]:
        """Average the gradients; inside, parameters and gradients are slices; gather what was applied. All ranks."""
        outcome = {"applied": False}
        present = iter(self._average(mine) if mine else ())
        for bucket in mine:
            bucket.cut_([next(present) for _ in bucket.params])
        try:
            yield outcome
        finally:
            for bucket in mine:
                bucket.join_(gather=outcome["applied"])
                bucket.clear()

    def _average(self, mine: list[Bucket]) -> list[bool]:
        """Reduce what is not reduced yet; whether each parameter had a gradient on any rank. All ranks."""
        late = [bucket for bucket in mine if bucket.mean is None]
        for bucket in late:
            bucket.note()
        asked, self._asked = self._asked or Flags(mine, self.context.device), None
        for number, bucket in enumerate(late):
            if number > 1:
                late[number - 2].wait()
            self._reduce(bucket, number % 2)
        for bucket in late:
            bucket.wait()
        return asked.answer(mine)

    def reduce_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing: `optimizer_step` has averaged the gradients into slices when the default would call this."""

    def clip_(self, parameters: Sequence[nn.Parameter], clip: Clip) -> Tensor | None:
        if clip.algorithm != "norm" or not self._shares:
            return super().clip_(parameters, clip)
        grads = [param.grad for param in parameters if param.grad is not None]
        norm = gradients.total_norm(grads).to(self.context.device)
        square = norm.to(torch.promote_types(norm.dtype, torch.float32)) ** 2
        dist.all_reduce(square)  # all ranks
        norm = square.sqrt()
        gradients.multiply_(grads, torch.clamp(clip.value / (norm + 1e-6), max=1.0))
        return norm

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        super().zero_grad(optimizer, set_to_none)
        self._asked = None
        for bucket in self._layouts.get(optimizer, Layout()).buckets:
            bucket.clear()

    # ------------------------------------------------------------------------------------------------- checkpoints

    def _is_slice(self, value: Any, key: str, ranges: Ranges) -> bool:
        a, b = ranges[self.context.world.rank]
        return isinstance(value, Tensor) and key not in elementwise.PER_PARAMETER and value.shape == (b - a,)

    def from_optimizer(self, optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
        layout, world = self._layouts.get(optimizer, Layout()), self.context.world
        ranges = layout.ranges.get(param)
        if ranges is None or not self._is_slice(value, key, ranges):
            return value
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self._mesh is None:
            self._mesh = self.context.mesh()
        shape = layout.shapes[param]
        target = rows(shape, world.world_size)
        local = move(value, ranges, target, world.rank)
        if not shape:
            return DTensor.from_local(local.view(()), self._mesh, [Replicate()], run_check=False)
        stride = torch.empty(shape, device="meta").stride()
        low, high = target[world.rank]
        local = local.view((high - low) // stride[0], *shape[1:])
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def to_optimizer(self, optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
        layout, world = self._layouts.get(optimizer), self.context.world
        if (
            layout is None
            or not isinstance(value, Tensor)
            or key in elementwise.PER_PARAMETER
            or value.shape != param.shape
        ):
            return value
        if param not in layout.ranges:  # frozen since it was trained
            layout.ranges[param], layout.shapes[param] = rows(param.shape, world.world_size), param.shape
        a, b = layout.ranges[param][world.rank]
        return value.reshape(-1)[a:b].clone()


class Flags:
    """Asks all ranks which parameters had a gradient, and goes on meanwhile: one byte for each."""

    def __init__(self, order: Sequence[Bucket], device: torch.device) -> None:
        self.order = order
        self.has = [flag for bucket in order for flag in bucket.present]
        self.flags = torch.tensor(self.has, dtype=torch.uint8, device=device)
        self.work: Any = dist.all_reduce(self.flags, dist.ReduceOp.MAX, async_op=True)  # all ranks

    def answer(self, wanted: Sequence[Bucket]) -> list[bool]:
        """The answers for some of the buckets; the device is read only where a gradient is missing here."""
        self.work.wait()
        found = iter(self.has if all(self.has) else self.flags.tolist())
        by_bucket = {bucket: [bool(next(found)) for _ in bucket.params] for bucket in self.order}
        return [flag for bucket in wanted for flag in by_bucket[bucket]]


def _signature(params: Iterable[nn.Parameter]) -> list[tuple[int, bool]]:
    return [(id(param), param.requires_grad) for param in params]


def _broadcast_together(tensors: list[Tensor]) -> None:
    """Give every rank rank 0's, in one collective per dtype."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor.detach())
    for members in kinds.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        dist.broadcast(flat, 0)  # all ranks
        for tensor, part in zip(members, torch.split(flat, [tensor.numel() for tensor in members]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def zero1(bucket_size_mb: float = 25.0, elementwise: bool = False, broadcast_buffers: bool = True) -> Zero:
    """Zero with stage 1."""
    return Zero(1, bucket_size_mb, elementwise, broadcast_buffers)


def zero2(bucket_size_mb: float = 25.0, elementwise: bool = False, broadcast_buffers: bool = True) -> Zero:
    """Zero with stage 2."""
    return Zero(2, bucket_size_mb, elementwise, broadcast_buffers)


def zero3(**options: Any) -> Strategy:
    """ZeRO stage 3: `FSDP`, whose options it takes, with every unit's parameters freed after its forward."""
    from trivet.strategies.fsdp import FSDP

    return FSDP(reshard_after_forward=True, **options)


def zero(
    stage: int = 1, bucket_size_mb: float = 25.0, elementwise: bool = False, broadcast_buffers: bool = True
) -> Strategy:
    """`Zero` with stage 1 or 2; with stage 3 what `zero3` returns, with units of the size of a bucket."""
    if stage != 3:
        return Zero(stage, bucket_size_mb, elementwise, broadcast_buffers)
    if elementwise or not broadcast_buffers:
        raise ConfigurationError(
            "zero: stage 3 has no use for the options elementwise and broadcast_buffers; leave them out. Its other "
            "options are those of fsdp: --strategy zero3."
        )
    return zero3(unit_size_mb=bucket_size_mb)
