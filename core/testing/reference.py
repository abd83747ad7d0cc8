"""The reference: training written by hand in plain PyTorch, in one process, on whole global batches.

It imports nothing of Trivet (a test sees to it), so that a mistake of Trivet's cannot be in both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LR = 0.8
SHRINK = 1 / 16  # of the loss: the first loss scale of float16 (65536) does not overflow by itself
FIRST = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")  # the first optimizer's, under manual optimization


@dataclass(frozen=True)
class Recipe:
    """What is trained and how. Everything that both sides need to know."""

    samples: int = 22
    batch_size: int = 4
    epochs: int = 2
    accumulate: int = 1
    optimizer: str = "sgd"
    clip: float | None = None
    algorithm: str = "norm"
    manual: bool = False
    independent: bool = False  # the second loss does not see the first step
    tokens: bool = False  # samples of different lengths, weighted by their tokens
    frozen: tuple[str, ...] = ()
    unfreeze_at: int | None = None  # epoch
    overflow_at: int | None = None  # attempted update
    skip_at: int | None = None  # update in which the last batch has no loss; the others' samples are what is left
    unlike: bool = False  # every other batch uses other layers
    dropout: float = 0.0
    shuffle: bool = False
    apart: int = 0  # the targets of so many ranks' batches lie apart, so that one rank's samples do not stand for all
    deaf: bool = False  # a mistake, made on purpose: nothing is learned from the second half of each global batch


@dataclass(frozen=True)
class Dtypes:
    """Storage, compute, (initial, growth, backoff, interval) of a dynamic loss scale or None, what optimizers step, and
    what gradients travel in; the last two are as what is stored where they are None.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    scaling: tuple[float, float, float, int] | None = None
    state: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @property
    def mixed(self) -> bool:
        return self.param != self.compute


@dataclass
class Record:
    """What happened."""

    losses: list[float] = field(default_factory=list)  # by attempted update
    first_gradients: dict[str, Tensor] = field(default_factory=dict)  # reduced and unscaled, not clipped
    weights: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)  # by applied update
    rates: list[float] = field(default_factory=list)  # learning rate after each attempted update
    updates: int = 0
    skipped: int = 0
    scale: float | None = None


def add_layers(module: nn.Module, dropout: float = 0.0) -> None:
    """Uneven shapes, and a parameter that the module owns itself."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module.fc1 = nn.Linear(3, 5)
        module.fc2 = nn.Linear(5, 7)
        module.fc3 = nn.Linear(7, 2)
        module.offset = nn.Parameter(torch.randn(2))
    module.drop = nn.Dropout(dropout)


def forward(module: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(module.fc1(x))
    hidden = module.drop(torch.tanh(module.fc2(hidden)))
    output: Tensor = module.fc3(hidden) + module.offset
    return output


def loss_of(module: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The mean over samples, or over tokens where the batch has lengths."""
    x, y, *lengths = batch
    error = (forward(module, x) - y) ** 2
    if not lengths:
        return SHRINK * error.mean()
    mask = torch.arange(x.shape[1], device=x.device) < lengths[0][:, None]
    loss: Tensor = SHRINK * (error.mean(-1) * mask).sum() / mask.sum()
    return loss


def second_loss_of(module: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return loss_of(module, batch) + 0.1 * SHRINK * (forward(module, batch[0]) ** 2).mean()


def separate_loss_of(module: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Depends on the second optimizer's parameters only."""
    constant = module.fc3(batch[0].new_ones(len(batch[0]), 7))  # called, since a sharded weight is whole only in there
    loss: Tensor = SHRINK * ((constant + module.offset - batch[1]) ** 2).mean()
    return loss


def unlike_loss_of(module: Any, batch: tuple[Tensor, ...], odd: bool) -> Tensor:
    """An odd batch goes around the second layer, an even one does without the offset."""
    hidden = torch.tanh(module.fc1(batch[0]))
    hidden = nn.functional.pad(hidden, (0, 2)) if odd else torch.tanh(module.fc2(hidden))
    output = module.fc3(hidden) + (module.offset if odd else 0.0)
    loss: Tensor = SHRINK * ((output - batch[1]) ** 2).mean()
    return loss


def unlike_losses_of(module: Any, batch: tuple[Tensor, ...], size: int) -> Tensor:
    """The mean over the samples of a global batch that was put together from batches of this size."""
    parts = list(zip(*(torch.split(tensor, size) for tensor in batch), strict=True))
    losses = [unlike_loss_of(module, part, bool(n % 2)) * len(part[0]) for n, part in enumerate(parts)]
    return torch.stack(losses).sum() / len(batch[0])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        add_layers(self)


def data(recipe: Recipe) -> tuple[Tensor, ...]:
    """Tensors whose first dimension counts samples; floats are float32."""
    generator = torch.Generator().manual_seed(11)
    n = recipe.samples
    if not recipe.tokens:
        x, y = torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)
        if recipe.apart:
            y += 4.0 * (torch.arange(n) // recipe.batch_size % recipe.apart)[:, None]
        return x, y
    lengths = torch.randint(1, 7, (n,), generator=generator)
    return torch.randn(n, 6, 3, generator=generator), torch.randn(n, 6, 2, generator=generator), lengths


def global_batches(recipe: Recipe, batches_per_update: int) -> Iterator[tuple[Tensor, ...]]:
    """The updates of one epoch, in order: so many of the user's batches each, the last may be short."""
    tensors, size = data(recipe), recipe.batch_size * batches_per_update
    for start in range(0, recipe.samples, size):
        yield tuple(tensor[start : start + size] for tensor in tensors)


def optimizer_over(parameters: Any, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)  # which float16 holds
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


class Scale:
    """Dynamic loss scaling as in Micikevicius et al. 2018."""

    def __init__(self, dtypes: Dtypes) -> None:
        self.on = dtypes.scaling is not None
        self.value, self.growth, self.backoff, self.interval = dtypes.scaling or (1.0, 1.0, 1.0, 1)
        self.good, self.overflowed = 0, False

    def unscale(self, parameters: Sequence[Tensor]) -> bool:
        grads = [p.grad for p in parameters if p.grad is not None]
        if self.on and not all(torch.isfinite(g).all() for g in grads):
            self.overflowed = True
            return False
        for grad in grads:
            grad.div_(self.value)
        return True

    def update(self) -> None:
        self.good = 0 if self.overflowed else self.good + 1
        if self.overflowed:
            self.value *= self.backoff
        elif self.good == self.interval:
            self.value, self.good = self.value * self.growth, 0
        self.overflowed = False


def loss_over(weights: dict[str, Tensor], recipe: Recipe) -> float:
    """The mean loss of all samples under these weights, in float64."""
    net = Net().double()
    net.load_state_dict({name: weight.double() for name, weight in weights.items()})
    with torch.no_grad():
        return float(loss_of(net, tuple(tensor.double() for tensor in data(recipe))))


def train(recipe: Recipe, batches_per_update: int, dtypes: Dtypes = Dtypes()) -> Record:
    """Train on whole global batches."""
    net, record, scale = Net().to(dtypes.param), Record(), Scale(dtypes)
    names = dict(net.named_parameters())
    copied = dtypes.state not in (None, dtypes.param)
    stepped = {n: nn.Parameter(p.detach().to(dtypes.state)) if copied else p for n, p in names.items()}
    parts = [list(names)]
    if recipe.manual:
        parts = [[n for n in names if (n in FIRST) is first] for first in (True, False)]
    optimizers = [optimizer_over([stepped[n] for n in part], recipe.optimizer) for part in parts]
    schedule = None if recipe.manual else schedule_of(optimizers[0])
    for name in recipe.frozen:
        names[name].requires_grad_(False)

    def backward_and_step(loss: Tensor, part: Sequence[str], optimizer: torch.optim.Optimizer) -> bool:
        group = [stepped[n] for n in part]
        for n in part:
            names[n].grad = None
        (loss * scale.value).backward()  # type: ignore[no-untyped-call]
        for n in part if copied else ():
            grad = names[n].grad
            stepped[n].grad = None if grad is None else grad.to(dtypes.state)
        if not scale.unscale(group):
            return False
        if not record.first_gradients:
            record.first_gradients = {n: g.clone() for n in part if (g := stepped[n].grad) is not None}
        if recipe.clip is not None and recipe.algorithm == "norm":
            record.norms.append(float(nn.utils.clip_grad_norm_(group, recipe.clip)))
        elif recipe.clip is not None:
            nn.utils.clip_grad_value_(group, recipe.clip)
        optimizer.step()
        for n in part if copied else ():
            names[n].data.copy_(stepped[n].detach())
        return True

    for epoch in range(recipe.epochs):
        if epoch == recipe.unfreeze_at:
            for name in recipe.frozen:
                names[name].requires_grad_(True)
        for batch in global_batches(recipe, batches_per_update):
            if not dtypes.mixed:
                batch = tuple(t.to(dtypes.param) if t.is_floating_point() else t for t in batch)
            context = torch.autocast("cpu", dtypes.compute) if dtypes.mixed else contextlib.nullcontext()
            if len(record.losses) == recipe.skip_at:
                batch = tuple(tensor[: recipe.batch_size * (batches_per_update - 1)] for tensor in batch)
            with context:
                loss = unlike_losses_of(net, batch, recipe.batch_size) if recipe.unlike else loss_of(net, batch)
            if len(record.losses) == recipe.overflow_at:
                loss = loss * float("inf")
            record.losses.append(float(loss.detach()))
            if recipe.deaf:
                with context:
                    loss = loss_of(net, tuple(tensor[: len(tensor) // 2] for tensor in batch))
            applied = backward_and_step(loss, parts[0], optimizers[0])
            if recipe.manual:
                with context:
                    second = separate_loss_of(net, batch) if recipe.independent else second_loss_of(net, batch)
                applied |= backward_and_step(second, parts[1], optimizers[1])
            scale.update()
            record.updates += applied
            record.skipped += not applied
            if applied and schedule is not None:
                schedule.step()
            record.rates.append(optimizers[0].param_groups[0]["lr"])
    record.weights = {name: p.detach() for name, p in names.items()}
    record.scale = scale.value if scale.on else None
    return record
