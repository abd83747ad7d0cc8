"""The Plan against reality: what the first update really did, compared with what was promised."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .errors import PlanMismatch
from .observed import Observed

if TYPE_CHECKING:
    from .capabilities import Plan
    from .engine import Engine
    from .launch.world import World

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Layers whose output has the compute dtype under every policy. Norms and losses may stay in float32 under autocast.
MATMUL_LAYERS = (
    nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FirstUpdate:
    """Watches one update. `finish` raises `PlanMismatch` with every difference; costs nothing afterwards.

    Made before any step runs, since a step may put what it likes into a buffer; `watch` comes right before the update.
    """

    def __init__(self, engine: Engine, plan: Plan, world: World) -> None:
        self.engine, self.plan, self.world = engine, plan, world
        self.activations: dict[str, str] = {}  # dtype -> the first layer that gave it
        self.handles: list[RemovableHandle] = []
        self.observed: Observed | None = None
        self.observing = False
        self.buffers = list(self._buffer_differences())

    def watch(self) -> None:
        """Record what layers give from now on."""
        self.handles = [
            layer.register_forward_hook(partial(self._record, name))
            for name, layer in self.engine.module.named_modules()
            if isinstance(layer, MATMUL_LAYERS)
        ]

    def begin(self) -> None:
        """The update begins, whose batches are there: record what torch is asked for, too."""
        if not self.engine.step.compiled:  # dynamo would trace through it, and compile again without it
            self.observed = Observed()
            self.observed.__enter__()  # type: ignore[no-untyped-call]
            self.observing = True

    def _record(self, name: str, layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            self.activations.setdefault(name_of(output.dtype), name)

    def finish(self) -> None:
        """Compare and stop watching. Gradients are still there, reduced and not yet cleared."""
        self.stop()
        differences = list(self._differences())
        if differences:
            raise PlanMismatch(
                "the first update did not do what the Plan says:\n  - "
                + "\n  - ".join(differences)
                + "\nA plugin offers what it does not do, or the module overrides dtypes or devices by hand."
            )

    def stop(self) -> None:
        """Stop watching."""
        if self.observed is not None and self.observing:
            self.observed.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.observing = False
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _differences(self) -> Iterator[str]:
        plan, stored = self.plan, self.engine.strategy.storage_device(torch.device(self.plan.device_type))
        for name, param in self.engine.module.named_parameters():
            if param.is_floating_point() and name_of(param.dtype) != plan.param_dtype:
                yield f"parameter {name!r} is stored as {name_of(param.dtype)}, planned {plan.param_dtype}"
                break
        if self.activations and plan.compute_dtype not in self.activations:
            layers = ", ".join(f"{name!r} {dtype}" for dtype, name in sorted(self.activations.items()))
            yield f"matrix products gave {sorted(self.activations)}, planned {plan.compute_dtype} (layers: {layers})"
        yield from self._observed_differences()
        for name, param in self.engine.module.named_parameters():
            if param.grad is not None and param.is_floating_point() and param.grad.dtype != param.dtype:
                yield f"the gradient of {name!r} is {name_of(param.grad.dtype)}, its parameter {name_of(param.dtype)}"
                break
        yield from self.buffers[:1]
        yield from self._state_differences(stored.type)
        for name, param in self.engine.module.named_parameters():
            if param.device.type != stored.type:
                yield f"parameter {name!r} is on {param.device}, planned {stored.type}"
                break
            if param.grad is not None and param.grad.device.type != stored.type:
                yield f"the gradient of {name!r} is on {param.grad.device}, planned {stored.type}"
                break
        for name, buffer in self.engine.module.named_buffers():
            if buffer.device.type != plan.device_type:
                yield f"buffer {name!r} is on {buffer.device}, planned {plan.device_type}"
                break
        if self.world.world_size != plan.world_size:
            yield f"the run has {self.world.world_size} processes, planned {plan.world_size}"

    def _observed_differences(self) -> Iterator[str]:
        """What no layer told: products of the module's own, and the dtype that gradients were added up in."""
        plan, strategy, observed = self.plan, self.engine.strategy, self.observed
        if observed is None:
            return
        products = {name_of(dtype) for dtype in observed.products}
        if not self.activations and products and plan.compute_dtype not in products:
            yield f"matrix products gave {sorted(products)}, planned {plan.compute_dtype}"
        if self.world.world_size == 1 or strategy.synchronises_every > 1 or strategy.own_wire:
            return
        # flags and sums for records are few; a module may add up activations of its own, in whatever dtype
        trained = sum(p.numel() for p in self.engine.module.parameters() if p.requires_grad)
        many = {name_of(dtype) for dtype, n in observed.added.items() if n >= trained / self.world.world_size / 2}
        if many and plan.reduce_dtype not in many:
            yield (
                f"ranks added up gradients in {' and '.join(sorted(many))}, planned {plan.reduce_dtype}; a strategy "
                "casts what it sends to context.policy.reduce, or says own_wire"
            )

    def _buffer_differences(self) -> Iterator[str]:
        """Narrower ones; a wider buffer may be meant so."""
        planned = getattr(torch, self.plan.param_dtype)
        for name, buffer in self.engine.module.named_buffers():
            if buffer.dtype in FLOATS and torch.promote_types(buffer.dtype, planned) != buffer.dtype:
                yield f"buffer {name!r} is {name_of(buffer.dtype)}, planned {self.plan.param_dtype}"

    def _state_differences(self, stored: str) -> Iterator[str]:
        """Of torch's own optimizers, whose state has the dtype of what they step; others choose theirs."""
        for optimizer in self.engine.optimizers:
            if not type(optimizer).__module__.startswith("torch.optim."):
                continue
            for key, value in (pair for state in optimizer.state.values() for pair in state.items()):
                if not isinstance(value, Tensor) or not value.dim() or value.dtype not in FLOATS:
                    continue
                if name_of(value.dtype) != self.plan.state_dtype:
                    name = type(optimizer).__name__
                    yield f"{name} keeps {key!r} in {name_of(value.dtype)}, planned {self.plan.state_dtype}"
                    return
                if value.device.type != stored:
                    yield f"{type(optimizer).__name__} keeps {key!r} on {value.device}, planned {stored}"
                    return
