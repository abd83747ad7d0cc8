"""Run: all that a running fit, validate, test or predict knows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import manual, overridden
from .check import FirstUpdate
from .checkpoint.background import Background
from .hooks import Hooks, call, overrides
from .limits import Limits as Limits
from .metric_objects import MetricObjects
from .metrics import Metrics, Silent
from .module import Module
from .plugins import Accelerator, Clip, MicroBatch, StepResult, Strategy
from .seeding import derive, mark, of_host, of_torch, seed_all, seed_host, seed_torch
from .state import Progress

if TYPE_CHECKING:
    from .capabilities import Plan
    from .data.evaluation import EvalData
    from .data.train import TrainData
    from .data.transfer import Transfer
    from .data.window import Ahead
    from .engine import Engine
    from .launch.group import Group
    from .launch.signals import Stop
    from .launch.world import World
    from .trainer import Trainer

# salts: which of a run's random streams a number belongs to
NOISE, EPOCH_START, VALIDATION = 1, 2, 3


@dataclass
class Run:
    """All that a running job knows. The user's objects reach it, it is never a part of them."""

    trainer: Trainer
    module: Module
    engine: Engine
    plan: Plan
    hooks: Hooks
    world: World
    group: Group
    stop: Stop
    progress: Progress
    limits: Limits
    seed: int
    train_data: TrainData | None = None
    # loaders by what is done with them: "validation", "test", "predict"
    data: dict[str, list[EvalData]] = field(default_factory=lambda: {"validation": [], "test": [], "predict": []})
    transfer: Transfer | None = None  # what is done to each batch, where anything is
    ahead: Ahead | None = None  # what is done with each window one turn early, where anything is
    same_on_all_ranks: Callable[[str, Any], None] = lambda what, names: None
    backward: Any = None
    keeps_predictions: bool = False
    # of this rank, by loader: number of the batch, prediction, indices of its samples
    predictions: list[list[tuple[int, Any, list[Any] | None]]] = field(default_factory=list)
    loader: EvalData | None = None  # that is being evaluated
    accumulate: int = 1
    on_skip: str | None = None
    micro: MicroBatch | None = None  # the micro-batch that is now in the step
    manual_results: list[StepResult] = field(default_factory=list)
    toggled: dict[nn.Parameter, bool] = field(default_factory=dict)
    first: FirstUpdate | None = None
    before_step: Callable[[Optimizer], None] | None = None
    backwards: int = 0  # calls of manual_backward in the current update
    stepping: bool = False  # whether a manual step is on its way through the strategy
    clipping: bool = False  # whether `Module.configure_gradient_clipping` runs
    manual_clips: dict[Optimizer, Clip] = field(default_factory=dict)  # asked for in the step of that optimizer
    cut: bool = False  # whether a hook ended the epoch
    resumed: bool = False
    ends_epoch: bool = False  # whether the newest update was the epoch's last, as far as the data knows
    # The updates that the streams of Python and numpy, and torch's of the CPU, were last seeded for; none drew since
    host_noise: int = 0
    torch_noise: int = 0
    marked: bytes = b""  # `mark` as the newest step's streams began
    loaded_in: int = -1  # the epoch that loaders were last asked for
    reload: Callable[[], None] | None = None  # at the begin of an epoch; see ``reload_dataloaders_every_n_epochs``
    validated_at: float = 0.0  # by the clock, where validation goes by it
    logged_at: int = -1  # the update of the newest row of steps
    evaluated: int = 0  # batches that were evaluated, of any kind
    validations: int = 0  # begun since the start of this process, the same on all ranks
    boundaries: int = 0  # update boundaries since the start of this process, the same on all ranks
    background: Background = field(init=False)

    def __post_init__(self) -> None:
        objects, kind = MetricObjects(self.module), Silent if self.trainer.barebones else Metrics
        self.background = Background(self.world.rank, self.world.world_size)
        self.train_metrics = kind("training", self.group, objects)
        self.val_metrics = kind("validation", self.group, objects)
        self.train_metrics.newest_validation = self.val_metrics.values
        self.test_metrics = kind("test", self.group, objects)
        self._no_metrics = kind("prediction", self.group, objects)
        self.metrics, self.logged_at = self.train_metrics, self.progress.update
        accelerator = self.engine.accelerator
        self.seed_device = accelerator.seed if _has(accelerator, "seed") else None
        self.step_boundary = accelerator.step_boundary if _has(accelerator, "step_boundary") else None
        module, strategy = self.module, self.engine.strategy
        if self.engine.step.compiled:  # what is recorded is no part of a graph
            for name in ("log", "log_dict"):
                object.__setattr__(module, name, torch.compiler.disable(getattr(module, name)))  # type: ignore[no-untyped-call]
        self.zero_grad: Callable[[Any], None] = methodcaller("zero_grad")  # no frame between, where nobody overrides it
        if overrides(module, Module, "optimizer_zero_grad"):
            at = self.progress
            self.zero_grad = lambda optimizer: module.optimizer_zero_grad(at.epoch, at.batch, optimizer)
        elif overrides(strategy, Strategy, "zero_grad"):
            self.zero_grad = strategy.zero_grad
        self.forward_backward: Callable[..., None] = strategy.forward_backward
        self.optimizer_step: Callable[..., StepResult] = strategy.optimizer_step
        self.clip = self.engine.clip
        if self.hooks.on_before_optimizer_step:
            self.before_step = lambda optimizer: call(self.hooks.on_before_optimizer_step, optimizer)
        if module.automatic_optimization:
            if overrides(module, Module, "optimizer_step"):
                self.optimizer_step = overridden.own_step(self)
            if overrides(module, Module, "configure_gradient_clipping"):
                self.clip, self.before_step = None, overridden.own_clipping(self)
        self._wrapped = [manual.ManualOptimizer(optimizer, self) for optimizer in self.engine.optimizers]

        manually = self.train_data is not None and not module.automatic_optimization
        self.guards = [manual.guard(self, optimizer) for optimizer in self.engine.optimizers] if manually else []
        self.guards += objects.watch(self.world.world_size)

    def gradient_mode(self) -> AbstractContextManager[None]:
        """Of an evaluation outside of a fit."""
        whole = self.trainer.inference_mode and not self.engine.lazy  # where such tensors fail
        return torch.inference_mode() if whole else torch.no_grad()

    def close_data(self) -> None:
        """End the workers of loaders, where they live on from epoch to epoch."""
        for data in (self.train_data, *(one for loaders in self.data.values() for one in loaders)):
            if data is not None:
                data.close()

    @property
    def every_metrics(self) -> tuple[Metrics, ...]:
        return self.train_metrics, self.val_metrics, self.test_metrics

    def metrics_of(self, kind: str) -> Metrics:
        """Of ``"validation"``, ``"test"`` or ``"predict"``."""
        found = {"validation": self.val_metrics, "test": self.test_metrics, "predict": self._no_metrics}
        return found[kind]

    def optimizers(self) -> list[Any]:
        return list(self.engine.optimizers) if self.module.automatic_optimization else list(self._wrapped)

    def manual_backward(self, loss: Tensor, **options: Any) -> None:
        manual.backward(self, loss, options)

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str | None) -> None:
        manual.clip_gradients(self, optimizer, value, algorithm)

    def toggle(self, optimizer: Any) -> None:
        manual.toggle(self, optimizer)

    def untoggle(self) -> None:
        manual.untoggle(self)

    def reseed(self, salt: int, position: int) -> None:
        """Start the random streams of a position: nothing that was drawn before matters for what is drawn now."""
        value = derive(self.seed, salt, position, self.world.rank)
        seed_all(value)
        if self.seed_device is not None:
            self.seed_device(value)
        self.host_noise = self.torch_noise = self.progress.update + self.progress.skipped

    def begin_step(self) -> None:
        """Start a step's random streams: the device's anew, the CPU's as `end_step` left them, whatever data drew."""
        if self.seed_device is not None:
            self.seed_device(derive(self.seed, NOISE, self.progress.update + self.progress.skipped, self.world.rank))
        if mark() != self.marked:
            self._seed_moved()

    def end_step(self) -> None:
        """The CPU's streams were drawn from since the step began: start them anew. Last between two updates, before
        data, and only where `mark` is not `marked`."""
        self.host_noise, self.torch_noise = self.next_noise()
        self._seed_moved()

    def next_noise(self) -> tuple[int, int]:
        """What `host_noise` and `torch_noise` will be in the next step; changes nothing."""
        now, before, update = mark(), self.marked, self.progress.update + self.progress.skipped
        return (
            update if before and now[of_host] != before[of_host] else self.host_noise,
            update if before and now[of_torch] != before[of_torch] else self.torch_noise,
        )

    def _seed_moved(self) -> None:
        now, before = mark(), self.marked
        if now[of_torch] != before[of_torch]:
            seed_torch(derive(self.seed, NOISE, self.torch_noise, self.world.rank))
        if now[of_host] != before[of_host]:
            seed_host(derive(self.seed, NOISE, self.host_noise, self.world.rank))
        self.marked = mark()


def _has(plugin: Any, method: str) -> bool:
    """Whether a plugin overrides an optional method of the public base class of its kind."""
    return getattr(type(plugin), method) is not getattr(Accelerator, method)
