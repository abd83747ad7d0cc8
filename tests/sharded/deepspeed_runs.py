"""The module that the tests of deepspeed train, and the tasks that a pool's workers run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.callbacks.checkpoint import Checkpoint

SAMPLES = 26  # with batches of 2: 13 micro-batches, so that the last update is short


class Net(trivet.Module):
    """Uneven shapes, two groups, a single number, a buffer and a frozen layer."""

    def __init__(self, optimizer: str = "SGD", hooks: bool = False, none_at: int = -1, thaw: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer, self.hooks, self.none_at, self.thaw = optimizer, hooks, none_at, thaw
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.register_buffer("offset", torch.randn(3))
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.calls: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.current_epoch == 0 and batch_idx == self.none_at:
            return None
        loss = ((self.second(torch.tanh(self.first(self.frozen(x)))) * self.scale + self.offset - y) ** 2).mean()
        self.losses.append(float(loss.detach()))
        return {"loss": loss} if self.hooks else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", ((self.second(torch.tanh(self.first(self.frozen(x)))) - y) ** 2).mean())

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.first.parameters(), *self.frozen.parameters()], "lr": 0.03, "weight_decay": 0.1},
            {"params": [*self.second.parameters(), self.scale]},
        ]
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        optimizer = getattr(torch.optim, self.optimizer)(groups, lr=0.05, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])
        return [optimizer], [{"scheduler": schedule, "interval": "update"}]

    def on_train_epoch_start(self) -> None:
        if self.thaw and self.current_epoch == 1:
            self.frozen.requires_grad_(True)

    def on_update_end(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if (norm := self.trainer.callback_metrics.get("grad_norm")) is not None:
            self.norms.append(norm)


class Hooked(Net):
    """Hooks around backward, and a backward of its own."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(f"before {loss.dim()}")

    def backward(self, loss: Tensor) -> None:
        self.calls.append("backward")
        loss.backward()

    def on_after_backward(self) -> None:
        self.calls.append("after")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("step")


class Manual(Net):
    automatic_optimization = False


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(SAMPLES, 3, generator=generator), torch.randn(SAMPLES, 3, generator=generator)
    return DataLoader(TensorDataset(x, y), 2)


@dataclass
class Outcome:
    weights: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    saved: str = ""


def trainer(strategy: Any, devices: int, **options: Any) -> trivet.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
    return trivet.Trainer(accelerator="cpu", strategy=strategy, devices=devices, **{**quiet, **options})


def fit(
    strategy: Any,
    devices: int,
    net: dict[str, Any],
    options: dict[str, Any],
    *,
    save: Path | None = None,
    resume: str | None = None,
    validates: bool = False,
) -> Outcome:
    """Task: one fit."""
    module = (Hooked if net.get("hooks") else Net)(**net)
    if save is not None:
        options = {**options, "enable_checkpointing": True, "callbacks": [Checkpoint(save)]}
    run = trainer(strategy, devices, **options)
    run.fit(module, loader(), loader() if validates else None, ckpt_path=resume)
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    saved = run.checkpoint_callback.last_model_path or run.checkpoint_callback.best_model_path if save else ""
    return Outcome(
        weights, module.norms, module.rates, module.losses, module.calls, dict(run.callback_metrics), str(saved)
    )


def validate(strategy: Any, devices: int, path: str) -> dict[str, float]:
    """Task: validation from a checkpoint."""
    return trainer(strategy, devices).validate(Net(), loader(), ckpt_path=path)[0]


def save_and_resume(strategy: Any, devices: int, folder: Path, net: dict[str, Any], options: dict[str, Any]) -> Any:
    """Task: two epochs at once, and one after the other."""
    whole = fit(strategy, devices, net, options)
    half = fit(strategy, devices, net, {**options, "max_epochs": 1}, save=folder)
    return whole, fit(strategy, devices, net, options, resume=half.saved), half.saved


def fit_and_validate(strategy: Any, devices: int, net: dict[str, Any], options: dict[str, Any]) -> Outcome:
    """Task: one fit with validation."""
    return fit(strategy, devices, net, options, validates=True)


def own_loop(runtime: Any, net: nn.Module, optimizer: Any) -> list[float]:
    """What `Runtime.launch` runs: a loop written by hand, two micro-batches an update."""
    module, optimizer = runtime.setup(net, optimizer)
    losses = []
    for index, (x, y) in enumerate(runtime.setup_dataloader(loader())):
        with runtime.no_sync() if index % 2 == 0 else nullcontext():
            loss = ((module(x) - y) ** 2).mean() / 2
            runtime.backward(loss)
        if index % 2:
            runtime.step(optimizer)
            runtime.zero_grad(optimizer)
        losses.append(float(loss.detach()))
    return losses


def by_hand(strategy: Any) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    runtime = trivet.Runtime(accelerator="cpu", strategy=strategy, devices=1)
    return list(runtime.launch(own_loop, net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)))
