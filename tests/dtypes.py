"""A module that notes the dtype of everything, and the task that trains it: what the Plan says against what happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from trivet.plan import Plan

PRECISIONS = ["fp32", "fp64", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]
LEAST = 16  # elements: what is smaller is a flag, a norm or a metric
REDUCTIONS = {
    "allreduce_",
    "allreduce_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "reduce_",
    "alltoall_base_",  # of which zero makes a reduce-scatter on gloo
}


@dataclass
class Seen:
    """Names of dtypes by what has them."""

    parameters: set[str] = field(default_factory=set)  # in the step, between updates, and when the run has ended
    buffers: set[str] = field(default_factory=set)
    compute: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)  # of validation
    gradients: set[str] = field(
        default_factory=set
    )  # before the optimizer's step, as the module's parameters show them
    communicated: set[str] = field(default_factory=set)
    stepped: set[str] = field(default_factory=set)
    state: set[str] = field(default_factory=set)
    plan: Plan | None = None


def names(tensors: Iterable[Any]) -> set[str]:
    return {str(t.dtype).removeprefix("torch.") for t in tensors if isinstance(t, Tensor) and t.dtype.is_floating_point}


def tensors(value: Any) -> Iterator[Tensor]:
    """All in any nesting of lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


class Noting(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(7, 11), nn.Linear(11, 5)
        self.register_buffer("offset", torch.randn(7))
        self.seen = Seen()

    def hidden(self, batch: Tensor) -> Tensor:
        first = self.first(batch + self.offset)
        self.seen.compute |= names([first])
        return self.second(torch.tanh(first))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.hidden(batch)
        self.seen.compute |= names([output])
        self.seen.parameters |= names(self.parameters())
        return output.pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.outputs |= names([self.hidden(batch)])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.gradients |= names(param.grad for param in self.parameters())
        self.seen.stepped |= names(param for group in optimizer.param_groups for param in group["params"])

    def on_update_end(self) -> None:
        self.seen.parameters |= names(self.parameters())
        self.seen.buffers |= names(self.buffers())
        states = self.trainer.optimizers[0].state.values()
        self.seen.state |= names(value for state in states for value in state.values() if getattr(value, "ndim", 0))


class Reductions(TorchDispatchMode):
    """Notes the dtypes of what is reduced, by whomever: all of it goes through an operator of ``c10d``."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()
        self.sizes: list[int] = []  # elements of each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in REDUCTIONS:
            large = [t for t in tensors(args) if t.is_floating_point() and t.numel() >= LEAST]
            self.dtypes |= names(large)
            self.sizes += [max(map(Tensor.numel, large))] if large else []
        return func(*args, **(kwargs or {}))


def train(strategy: Any, devices: int, precision: Any) -> Seen:
    """Task: two updates and a validation."""
    module, data = Noting(), torch.utils.data.DataLoader(torch.randn(4 * devices, 7), 2)
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, precision=precision, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    with Reductions() as reductions:
        trainer.fit(module, data, data)
    module.seen.parameters |= names(module.parameters())
    module.seen.buffers |= names(module.buffers())
    module.seen.communicated, module.seen.plan = reductions.dtypes, trainer.plan()
    return module.seen


def train_each(strategy: Any, devices: int, precisions: list[Any]) -> list[Seen]:
    """Task: the same with several precisions."""
    return [train(strategy, devices, precision) for precision in precisions]


def assert_as_planned(seen: Seen, what: str) -> None:
    """Everything has the dtype that the Plan states."""
    plan = seen.plan
    assert plan is not None
    planned = {
        "parameters": plan.param_dtype, "buffers": plan.param_dtype, "compute": plan.compute_dtype,
        "outputs": plan.compute_dtype, "state": plan.state_dtype,
    }  # fmt: skip
    for name, dtype in planned.items():
        assert getattr(seen, name) == {dtype}, f"{what}: {name}"
    # a strategy may keep gradients, and what it steps, where the hook does not see them
    assert seen.gradients <= {plan.param_dtype}, f"{what}: gradients"
    assert seen.stepped <= {plan.state_dtype}, f"{what}: stepped"
    if plan.world_size > 1:
        assert seen.communicated == {plan.reduce_dtype}, f"{what}: reduction"
