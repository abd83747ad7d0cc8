"""The module that the tests of zero train, and the tasks that a pool's workers run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.callbacks.checkpoint import Checkpoint

SAMPLES = 26  # with batches of 2: 13 micro-batches, so that the last update is short for 2 and for 4 ranks


class Net(trivet.Module):
    """Uneven shapes, tied weights, a scalar, a buffer, a frozen part, one parameter never used and one now and then."""

    def __init__(self, optimizer: str = "AdamW", thaw: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer, self.thaw = optimizer, thaw
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3)
        self.second.weight = nn.Parameter(torch.randn(3, 5))
        self.third = nn.Linear(5, 3, bias=False)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.never = nn.Parameter(torch.randn(4))
        self.sometimes = nn.Parameter(torch.randn(3, 1))
        self.register_buffer("offset", torch.randn(3))
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.shares: dict[str, int] = {}
        self.held: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, flag = batch
        hidden = torch.tanh(self.first(self.frozen(x)))
        if hasattr(self, "added"):
            hidden = hidden * self.added
        out = self.second(hidden) + self.scale * self.third(hidden) + self.offset
        loss = ((out - y) ** 2).mean()
        if flag.any():
            loss = loss + (flag.float().mean() * self.sometimes).sum()
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.first.parameters(), self.never], "lr": 0.03, "weight_decay": 0.1},
            {"params": [*self.second.parameters(), self.scale, self.sometimes, *self.frozen.parameters()]},
        ]
        optimizer = make(self.optimizer, groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])
        return [optimizer], [{"scheduler": schedule, "interval": "update"}]

    def on_train_epoch_start(self) -> None:
        if self.thaw and self.current_epoch == 1:
            self.frozen.requires_grad_(True)
            self.first.bias.requires_grad_(False)
            self.first.bias.grad = None
            self.added = nn.Parameter(torch.ones(5))
            self.trainer.optimizers[0].param_groups[1]["params"].append(self.added)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.held.append(any(param.grad is not None for param in self.parameters()))

    def on_update_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        self.rates.append(optimizer.param_groups[0]["lr"])
        if (norm := self.trainer.callback_metrics.get("grad_norm")) is not None:
            self.norms.append(norm)
        states = {n: optimizer.state.get(p, {}) for n, p in self.named_parameters()}
        self.shares = {n: sum(v.numel() for v in s.values() if v.dim()) for n, s in states.items()}


def make(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.01}
    if name == "SGD":
        options["momentum"] = 0.9
    if name == "RMSprop":
        options.update(momentum=0.5, centered=True)
    if name == "Rprop":
        groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
    if name == "Adam":
        options.update(amsgrad=True)
    return getattr(torch.optim, name)(groups, **options)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    flags = (torch.arange(SAMPLES) // 2) % 5 == 3  # whole micro-batches
    return DataLoader(TensorDataset(x, y, flags), 2)


@dataclass
class Outcome:
    weights: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    shares: dict[str, int] = field(default_factory=dict)
    held: list[bool] = field(default_factory=list)
    sent: dict[str, list[int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def trainer(strategy: Any, devices: int, **options: Any) -> trivet.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
    return trivet.Trainer(accelerator="cpu", strategy=strategy, devices=devices, **{**quiet, **options})


def outcome(net: Net) -> Outcome:
    weights = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    return Outcome(weights, net.norms, net.rates, net.shares, net.held)


def fit(strategy: Any, devices: int, net: dict[str, Any], options: dict[str, Any], count: bool = False) -> Outcome:
    """Task: one fit, with the bytes of every collective where ``count``."""
    module = Net(**net)
    sent: dict[str, list[int]] = {}
    with counting(sent if count else None):
        trainer(strategy, devices, **options).fit(module, loader())
    found = outcome(module)
    found.sent = sent
    return found


def fit_each(strategy: Any, devices: int, nets: list[dict[str, Any]], options: dict[str, Any]) -> list[Outcome]:
    """Task: several fits."""
    return [fit(strategy, devices, net, options) for net in nets]


def save_half(strategy: Any, devices: int, directory: Path, net: dict[str, Any], options: dict[str, Any]) -> str:
    """Task: one of two epochs, saved."""
    saver = Checkpoint(directory)
    options = {**options, "enable_checkpointing": True, "callbacks": [saver], "max_epochs": 1}
    trainer(strategy, devices, **options).fit(Net(**net), loader())
    return str(saver.last_model_path)


def go_on(strategy: Any, devices: int, paths: list[str], net: dict[str, Any], options: dict[str, Any]) -> list[Outcome]:
    """Task: the second epoch, from each checkpoint."""
    found = []
    for path in paths:
        module = Net(**net)
        trainer(strategy, devices, **options).fit(module, loader(), ckpt_path=path)
        found.append(outcome(module))
    return found


def with_a_reduce_scatter(*args: Any) -> Outcome:
    """Task: `fit` as if gloo had the collective."""
    from trivet.strategies import slices

    before = set(slices.EXCHANGED)
    slices.EXCHANGED.clear()
    try:
        return fit(*args)
    finally:
        slices.EXCHANGED.update(before)


class counting:
    """Record what every collective of `torch.distributed` sends or gathers, in bytes, by name."""

    NAMES = ("all_reduce", "broadcast", "all_to_all_single", "reduce_scatter", "all_gather")

    def __init__(self, into: dict[str, list[int]] | None) -> None:
        self.into = into

    def __enter__(self) -> None:
        self.undo: list[tuple[Any, str, Any]] = []
        if self.into is None:
            return
        from trivet.strategies import slices

        for name in self.NAMES:
            owner = slices if name in ("reduce_scatter", "all_gather") else torch.distributed
            self.undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self.counted(name, getattr(owner, name)))

    def counted(self, name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert self.into is not None
            largest = max(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))
            self.into.setdefault(name, []).append(largest)
            return function(*args, **options)

        return call

    def __exit__(self, *error: object) -> None:
        for owner, name, function in self.undo:
            setattr(owner, name, function)
