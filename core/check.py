"""The Plan against reality: what the first update really did, compared with what was promised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import PlanMismatch

if TYPE_CHECKING:
    from .capabilities import Plan
    from .engine import Engine
    from .launch.world import World

# Layers whose output has the compute dtype under every policy. Norms and losses may stay in float32 under autocast.
MATMUL_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Bilinear)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FirstUpdate:
    """Watches one update. `finish` raises `PlanMismatch` with every difference; costs nothing afterwards."""

    def __init__(self, engine: Engine, plan: Plan, world: World) -> None:
        self.engine, self.plan, self.world = engine, plan, world
        self.activations: set[str] = set()
        self.handles = [
            layer.register_forward_hook(self._record)
            for layer in engine.module.modules()
            if isinstance(layer, MATMUL_LAYERS)
        ]

    def _record(self, layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            self.activations.add(name_of(output.dtype))

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
        for handle in self.handles:
            handle.remove()

    def _differences(self) -> Any:
        plan, stored = self.plan, self.engine.strategy.storage_device(torch.device(self.plan.device_type))
        for name, param in self.engine.module.named_parameters():
            if param.is_floating_point() and name_of(param.dtype) != plan.param_dtype:
                yield f"parameter {name!r} is stored as {name_of(param.dtype)}, planned {plan.param_dtype}"
                break
        if self.activations and plan.compute_dtype not in self.activations:
            yield f"matrix products gave {sorted(self.activations)}, planned {plan.compute_dtype}"
        for name, param in self.engine.module.named_parameters():
            if param.grad is not None and param.is_floating_point() and param.grad.dtype != param.dtype:
                yield f"the gradient of {name!r} is {name_of(param.grad.dtype)}, its parameter {name_of(param.dtype)}"
                break
        for name, param in self.engine.module.named_parameters():
            if param.device.type != stored.type:
                yield f"parameter {name!r} is on {param.device}, planned {stored.type}"
                break
        if self.world.world_size != plan.world_size:
            yield f"the run has {self.world.world_size} processes, planned {plan.world_size}"
