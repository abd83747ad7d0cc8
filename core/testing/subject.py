"""The same training through Trivet: the module, and the tasks that a pool's workers run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .. import registry
from ..callbacks.checkpoint import Checkpoint
from ..module import Module
from ..trainer import Trainer
from . import reference
from .reference import Dtypes, Recipe, Record


@dataclass(frozen=True)
class Cell:
    """A combination of plugins (names, or objects) and a world size."""

    strategy: Any
    precision: Any
    world_size: int
    accelerator: Any = "cpu"

    def __hash__(self) -> int:
        return hash(str(self))  # a plugin may be given as a mapping

    def plugin(self, kind: str) -> Any:
        """A plugin of this cell, to be asked and not to be used; see `made`."""
        return made(kind, getattr(self, kind)).plugin

    @property
    def dtypes(self) -> Dtypes:
        """What the precision says of itself, and the strategy of what optimizers step, as plain data."""
        plugin = self.plugin("precision")
        wants, policy = plugin.scaling, plugin.policy
        scaling = wants and (wants.initial, wants.growth, wants.backoff, wants.interval)
        return Dtypes(policy.param, policy.compute, scaling, self.plugin("strategy").state_dtype(policy), policy.reduce)

    def trainer(self, recipe: Recipe, **options: Any) -> Trainer:
        """A Trainer without anything that the recipe does not ask for."""
        defaults: dict[str, Any] = {
            "max_epochs": recipe.epochs,
            "accumulate_grad_batches": recipe.accumulate,
            "gradient_clip_val": recipe.clip,
            "gradient_clip_algorithm": recipe.algorithm,
            "on_skip": None if recipe.skip_at is None else "samples",
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "devices": self.world_size,
        }
        return Trainer(
            strategy=self.strategy, accelerator=self.accelerator, precision=self.precision, **{**defaults, **options}
        )

    @property
    def names(self) -> tuple[str, str, str]:
        """Of strategy, precision and accelerator."""
        return name_of(self.strategy), name_of(self.precision), name_of(self.accelerator)

    def __str__(self) -> str:
        strategy, precision, accelerator = self.names
        where = "" if accelerator == "cpu" else f"{accelerator}-"
        return f"{strategy}-{precision}-{where}W{self.world_size}"


@cache
def _named(kind: str, name: str) -> registry.Selected:
    return registry.make(kind, name)


def made(kind: str, spec: Any) -> registry.Selected:
    """A plugin as `registry.make` gives it; the same object again for the same name, since it is only asked here."""
    return _named(kind, spec) if isinstance(spec, str) else registry.make(kind, spec)


def name_of(spec: Any) -> str:
    """How a plugin is called in ids and tables: by its name, or that of its class, and a mapping's options."""
    if isinstance(spec, Mapping):
        options = {**spec, **spec.get("init_args", {})}
        name = options.pop("name", "") or options["class_path"].rpartition(".")[2]
        said = ", ".join(f"{k}={v!r}" for k, v in options.items() if k not in ("class_path", "init_args"))
        return f"{name}({said})" if said else str(name)
    if isinstance(spec, registry.Selected):
        return spec.name
    return spec if isinstance(spec, str) else spec.__name__ if isinstance(spec, type) else type(spec).__name__


@dataclass
class Seen(Record):
    """What one rank saw; ``steps``: (epoch, micro-batch, loss, weight)."""

    steps: list[tuple[int, int, float, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    course: list[dict[str, Tensor]] = field(default_factory=list)  # this rank's parameters after each update


class Subject(Module):
    """Trains what the reference trains and records what it sees."""

    def __init__(self, recipe: Recipe, odd_rank: int | None = None) -> None:
        super().__init__()
        reference.add_layers(self, recipe.dropout)
        self.recipe, self.odd_rank, self.seen = recipe, odd_rank, Seen()
        self.automatic_optimization = not recipe.manual
        for name in recipe.frozen:
            self.get_parameter(name).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.recipe.unlike:
            loss = reference.unlike_loss_of(self, batch, bool(self.global_rank % 2))
        else:
            loss = reference.loss_of(self, batch)
        self.log("loss", loss, on_epoch=True)
        tried, last = self.trainer.progress.update + self.trainer.progress.skipped, self.trainer.world_size - 1
        if tried == self.recipe.skip_at and self.global_rank == last:
            return None
        if tried == self.recipe.overflow_at and self.global_rank == last:
            loss = loss * float("inf")
        if not self.automatic_optimization:
            first, second = self.optimizers()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            again = reference.separate_loss_of if self.recipe.independent else reference.second_loss_of
            later = again(self, batch)
            second.zero_grad()
            self.manual_backward(later)
            second.step()
        return loss

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            optimizer = reference.optimizer_over(self.parameters(), self.recipe.optimizer)
            return [optimizer], [{"scheduler": reference.schedule_of(optimizer), "interval": "update"}]
        named = list(self.named_parameters())
        groups = [[p for n, p in named if (n in reference.FIRST) is first] for first in (True, False)]
        return [reference.optimizer_over(group, self.recipe.optimizer) for group in groups]

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.recipe.unfreeze_at and self.odd_rank in (None, self.global_rank):
            for name in self.recipe.frozen:
                self.get_parameter(name).requires_grad_(True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = float(batch[-1].sum()) if self.recipe.tokens else float(len(batch[0]))
        if outputs is not None:  # a skipped batch
            self.seen.steps.append((self.current_epoch, batch_idx, float(outputs["loss"].detach()), weight))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.seen.first_gradients:
            held = {id(param) for group in optimizer.param_groups for param in group["params"]}
            mine = {n: p for n, p in self.named_parameters() if self.automatic_optimization or id(p) in held}
            shown = self.trainer.strategy.from_optimizer
            grads = {name: shown(optimizer, param, "grad", param.grad) for name, param in mine.items()}
            self.seen.first_gradients = {n: whole(grad).clone() for n, grad in grads.items() if grad is not None}

    def on_update_end(self) -> None:
        self.seen.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        norm = self.trainer.callback_metrics.get("grad_norm")
        if norm is not None and len(self.seen.norms) < self.trainer.progress.update:
            self.seen.norms.append(norm)
        if self.recipe.apart:
            self.seen.course.append({n: whole(p).clone() for n, p in self.named_parameters()})

    def on_train_end(self) -> None:
        seen, progress = self.seen, self.trainer.progress
        seen.weights = {n: whole(t).clone() for n, t in self.trainer.strategy.state_dict(self).items()}
        seen.metrics = dict(self.trainer.callback_metrics)
        seen.updates, seen.skipped, seen.progress = progress.update, progress.skipped, progress.to_dict()
        scaler = self._attached().engine.scaler
        seen.scale = None if scaler is None else float(scaler.scale)
        seen.optimizers = [together(held(optimizer)) for optimizer in self.trainer.optimizers]


class Tokens(Subject):
    """Weighted by tokens."""

    def batch_weight(self, batch: Any) -> float:
        return float(batch[-1].sum())


def held(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Options and state. Not ``state_dict()``, which fails where a strategy keeps groups empty between steps."""
    groups = optimizer.param_groups
    places = {param: place for place, param in enumerate(param for group in groups for param in group["params"])}
    state = {places.get(param, f"elsewhere, {n}"): value for n, (param, value) in enumerate(optimizer.state.items())}
    return {"groups": [{k: v for k, v in group.items() if k != "params"} for group in groups], "state": state}


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, on the CPU; all ranks call it."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().cpu()


def together(value: Any) -> Any:
    """`whole` for all tensors in any nesting."""
    if isinstance(value, dict):
        return {key: together(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [together(part) for part in value]
    return whole(value) if isinstance(value, Tensor) else value


def loader(recipe: Recipe) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*reference.data(recipe)), recipe.batch_size, shuffle=recipe.shuffle)


def train(cell: Cell, recipe: Recipe, odd_rank: int | None = None) -> Seen:
    """Task: one fit."""
    torch.manual_seed(5)
    module = (Tokens if recipe.tokens else Subject)(recipe, odd_rank)
    cell.trainer(recipe).fit(module, loader(recipe))
    return module.seen


def resume(cell: Cell, recipe: Recipe, directory: Path, interrupt: dict[str, Any], deterministic: bool) -> list[Seen]:
    """Task: a whole fit; then one that ``interrupt`` (limits) ends, and one that goes on from its checkpoint."""
    whole_run = Subject(recipe)
    options: dict[str, Any] = {"deterministic": deterministic}
    torch.manual_seed(5)
    cell.trainer(recipe, **options).fit(whole_run, loader(recipe))
    torch.manual_seed(5)
    saver = Checkpoint(directory)
    first = cell.trainer(recipe, enable_checkpointing=True, callbacks=[saver], **options, **interrupt)
    first.fit(Subject(recipe), loader(recipe))
    torch.manual_seed(99)  # a new process starts with another seed; the checkpoint's rules
    rest = Subject(recipe)
    cell.trainer(recipe, **options).fit(rest, loader(recipe), ckpt_path=saver.last_model_path)
    return [whole_run.seen, rest.seen]
