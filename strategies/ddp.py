"""DDP: every rank holds everything, and gradients are averaged in buckets while backward runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from trivet import gradients
from trivet.errors import ConfigurationError
from trivet.plugins import Context, MicroBatch, OwnState, Strategy
from trivet.strategies.powersgd import PowerSGD

# torch 2.13 renamed the argument and warns of the old name
BUFFERS = next(
    n for n in ("forward_sync_buffers", "broadcast_buffers") if n in signature(DistributedDataParallel).parameters
)
WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}
HOOKS = (*WIRE, "powersgd")


class DDP(Strategy):
    """Data parallelism on torch's DistributedDataParallel (Li et al. 2020).

    Args:
        bucket_size_mb: gradients are averaged in buckets of about this size, in MiB.
        gradient_as_bucket_view: gradients are views into the buckets, which saves one copy of them.
        static_graph: promise that every update uses the same parameters in the same order.
        find_unused_parameters: search each update for parameters without gradient. Off, an unused one is an error.
        broadcast_buffers: give all ranks the buffers of rank 0 before each forward.
        communication_hook: compress gradients on the wire: ``"fp16"``, ``"bf16"`` or ``"powersgd"``. The last sends
            after backward, not within.
        powersgd_rank: rank of PowerSGD's matrices (Vogels et al. 2019); more is more exact and more traffic.
        powersgd_start: updates that average whole gradients before PowerSGD begins.
    """

    def __init__(
        self,
        bucket_size_mb: float = 25.0,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        communication_hook: str | None = None,
        powersgd_rank: int = 1,
        powersgd_start: int = 0,
    ) -> None:
        if communication_hook not in (None, *HOOKS):
            raise ConfigurationError(
                f"ddp: communication_hook={communication_hook!r} is unknown; allowed are {', '.join(HOOKS)}."
            )
        if bucket_size_mb <= 0:
            raise ConfigurationError(f"ddp: bucket_size_mb={bucket_size_mb!r} must be positive.")
        if powersgd_rank < 1 or powersgd_start < 0:
            raise ConfigurationError(
                f"ddp: powersgd_rank={powersgd_rank!r} must be at least 1, and powersgd_start={powersgd_start!r} at "
                "least 0."
            )
        self.bucket_size_mb = bucket_size_mb
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_buffers = broadcast_buffers
        self.communication_hook = communication_hook
        self.own_wire = communication_hook is not None
        self.powersgd_rank = powersgd_rank
        self.powersgd_start = powersgd_start

    @property
    def offers(self) -> frozenset[str]:
        if self.communication_hook == "powersgd":  # an overflow would stay in its errors, which have no loss scale
            return super().offers - {"loss_scaling"}
        lacking = set() if self.find_unused_parameters else {"unused_parameters"}
        return (super().offers | {"lazy_devices"}) - lacking

    def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
        notes = []
        if self.communication_hook is not None:
            notes.append(f"ddp compresses gradients on the wire by {self.communication_hook!r}, whatever the precision")
        if self.communication_hook == "powersgd":
            notes.append("powersgd sends after backward; each rank keeps what it did not send, also in checkpoints")
        if self.communication_hook == "fp16":
            notes.append("gradients beyond 65504 become infinite on the way, which only loss scaling notices")
        if world_size > 2 and not deterministic:
            notes.append(
                "ddp on more than 2 ranks: a resumed run equals an unbroken one to 1e-6, since torch rebuilds its "
                "buckets after the first update; deterministic=True makes it exact"
            )
        return tuple(notes)

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        if context.deterministic and context.world.world_size > 2:
            context = replace(context, late=True)  # one flat average: torch's buckets change layout after an update
        self.powersgd: PowerSGD | None = None
        if self.communication_hook == "powersgd" and context.world.world_size > 1:
            context = replace(context, late=True)
            self.powersgd = PowerSGD(context, self.powersgd_rank, self.powersgd_start)
        self.context = context
        self.step = root
        self.trainable = {param for param in root.parameters() if param.requires_grad}
        self.unproved = True  # whether all of them get gradients
        if context.world.world_size == 1 or not self.trainable:
            return root  # torch wants a process group to wrap a module, and something to reduce in it
        cuda = context.device.type == "cuda"
        options: dict[str, Any] = {BUFFERS: self.broadcast_buffers}
        ddp = DistributedDataParallel(
            root,
            device_ids=[context.device] if cuda else None,
            bucket_cap_mb=self.bucket_size_mb,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused_parameters,
            **options,
        )
        if context.late:
            return ddp  # whose reducer never runs
        if self.communication_hook is not None:
            ddp.register_comm_hook(None, _hook(self.communication_hook))
        elif context.policy.reduce != context.policy.param:
            # torch reads a hook's annotations, and cannot read those that are strings
            ddp.register_comm_hook(context.policy.reduce, lambda dtype, bucket: _reduce_in(dtype, bucket))
        return ddp

    def forward_backward(self, root: nn.Module, batches: Iterable[MicroBatch], scale: float | None) -> None:
        if self.context.late and self.broadcast_buffers and isinstance(root, DistributedDataParallel):
            gradients.broadcast_together_(list(root.buffers()))  # the wrapper does not where it does not reduce
        try:
            super().forward_backward(root, batches, scale)
        except RuntimeError as error:
            # torch notices when the next forward begins, and numbers them in the order of those that are trained
            found = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            trained = [name for name, param in root.named_parameters() if param.requires_grad]
            raise self._unused([trained[int(number)] for number in found[1].split()]) from error

    def backward(self, root: nn.Module, loss: Tensor) -> None:
        super().backward(root, loss)
        if self.unproved and isinstance(root, DistributedDataParallel) and root.require_backward_grad_sync:
            self.unproved = False  # a bucket that lacks one gradient was not averaged: torch says so an update late
            if not (self.find_unused_parameters or self.static_graph):
                unused = [name for name, param in root.named_parameters() if param.requires_grad and param.grad is None]
                if unused:
                    raise self._unused(unused)

    def _unused(self, names: list[str]) -> ConfigurationError:
        names = [name.removeprefix("module.module.") for name in names]  # the wrapper's name and the step's
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return ConfigurationError(
            f"strategy 'ddp': rank {self.context.world.rank}'s loss did not depend on {listed}, which got no gradient, "
            "and ddp waits for one of every parameter that requires it. Use --strategy.find_unused_parameters true, in "
            "Python strategy={'name': 'ddp', 'find_unused_parameters': True}, or freeze what is not used."
        )

    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        return root.no_sync() if isinstance(root, DistributedDataParallel) else nullcontext()

    def unwrap(self, root: nn.Module) -> nn.Module:
        return root.module if isinstance(root, DistributedDataParallel) else root

    def refresh(self, root: nn.Module) -> nn.Module:
        """Wrap anew when parameters were frozen, unfrozen or added: the reducer knows only those it was built with.

        Wrapping is a collective. That all ranks changed the same parameters is checked through the store first, so
        that a change on one rank is an error and not a hang.
        """
        if not self.changed(root):
            return root
        step = self.unwrap(root)
        if isinstance(root, DistributedDataParallel):
            for param in step.parameters():
                if param.grad is not None:
                    param.grad = param.grad.clone()  # no views into the buckets of the old reducer
        del root  # its reducer's autograd hooks go with it
        kept = self.powersgd
        root = self.shard(step, self.context)
        self.powersgd = kept
        return root

    def reduce_(self, parameters: Sequence[nn.Parameter]) -> None:
        """What the wrapper's hooks do, where gradients are reduced at the step. All ranks."""
        world = self.context.world
        if self.powersgd is not None:
            self.powersgd.reduce_(parameters, {param: place for place, param in enumerate(self.names)})
            return
        if self.communication_hook is None:
            super().reduce_(parameters)
            return
        # float16 might not hold the sum
        found = [param.grad for param in parameters if param.grad is not None]
        gradients.multiply_(found, 1 / world.world_size)
        gradients.average_(parameters, world, WIRE[self.communication_hook])
        gradients.multiply_([p.grad for p in parameters if p.grad is not None], world.world_size)

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The user's names of all parameters."""
        return {param: name.removeprefix("module.") for name, param in self.step.named_parameters()}

    def own_state(self, root: nn.Module) -> OwnState:
        return OwnState() if self.powersgd is None else self.powersgd.state(self.names)

    def load_own_state(self, root: nn.Module, state: OwnState) -> None:
        if self.powersgd is None or not self.powersgd.load(state, self.names):
            super().load_own_state(root, state)


def _reduce_in(dtype: torch.dtype, bucket: Any) -> Any:
    """Average a bucket in the dtype that the precision's policy states."""
    gradients: Tensor = bucket.buffer()
    work = dist.all_reduce(gradients.to(dtype).div_(dist.get_world_size()), async_op=True)  # all ranks
    assert work is not None
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


def _hook(name: str) -> Callable[..., Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if name == "fp16":
        return default_hooks.fp16_compress_hook

    # torch refuses its own hook on gloo by the function's name, though gloo reduces bfloat16; and it reads annotations
    return lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
