"""What the table of `test_universal` is made of: its cells, the module that is trained, and the workers' tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.capture import by_name
from trivet.layout import whole

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "zero2", "zero3")
WORLD_SIZES = (1, 2, 4)
SAVED_AT, UPDATES = 3, 6  # the fifth update of an epoch is of 7 samples; the sixth belongs to the next epoch
BATCH_SIZE, BATCHES, SAMPLES = 3, 4, 55  # batches of the user's in an update, on as many ranks as there are


@dataclass(frozen=True, order=True)
class Place:
    """A strategy on so many processes."""

    strategy: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.strategy}-W{self.world_size}"


PLACES = tuple(Place(s, w) for s, w in product(STRATEGIES, WORLD_SIZES) if s != "single" or w == 1)
Pair = tuple[Place, Place]  # who wrote, and who reads
PAIRS: tuple[Pair, ...] = tuple(product(PLACES, PLACES))


def cover(pairs: Sequence[Pair]) -> list[Pair]:
    """Few pairs in which each place writes and each reads, with each pair of strategies and of world sizes.

    Greedy; where two pairs bring as much, one that changes the number of processes, then two of them.
    """

    def values(pair: Pair) -> set[tuple[Any, ...]]:
        writer, reader = pair
        strategies, sizes = (writer.strategy, reader.strategy), (writer.world_size, reader.world_size)
        return {("writes", writer), ("reads", reader), strategies, sizes}

    def worth(pair: Pair) -> tuple[bool, ...]:
        writer, reader = (place.world_size for place in pair)
        return writer != reader, reader == 2, writer == 2

    chosen: list[Pair] = []
    missing = set().union(*map(values, pairs))
    while missing:
        best = max(pairs, key=lambda pair: (len(values(pair) & missing), worth(pair)))
        chosen.append(best)
        missing -= values(best)
    return [pair for pair in pairs if pair in chosen]


# --------------------------------------------------------------------------------------------------------- the module


@dataclass
class Seen:
    """What one rank saw. ``states``: by update, weights and optimizer state by name, gathered; ``samples``: which ones
    this rank trained on, by update."""

    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)


class Zoo(trivet.Module):
    """Tied weights, a frozen layer, a parameter that is never used, buffers, a scalar, and shapes that shard unevenly:
    5 x 3 and a single row."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.narrow, self.wide = nn.Linear(5, 3), nn.Linear(3, 5)
        self.row = nn.Linear(5, 1)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.register_buffer("shift", torch.randn(5))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.path, self.seen = path, Seen()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, token, target = batch
        self.seen.samples.setdefault(self.trainer.progress.update + 1, []).extend(index.tolist())
        x = self.frozen(self.embedding(token) + self.shift)
        x = self.scale * self.wide(torch.tanh(self.narrow(x)))
        return nn.functional.cross_entropy(self.head(x), target) + self.row(x).pow(2).mean()

    def configure_optimizers(self) -> Any:
        first = [*self.embedding.parameters(), self.scale, self.unused]
        others = [p for p in self.parameters() if all(p is not one for one in first)]
        optimizer = torch.optim.Adam([{"params": first, "lr": 0.02}, {"params": others}], lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "update"}
        ]

    def on_train_start(self) -> None:
        self.seen.states[self.trainer.progress.update] = self.state()

    def on_update_end(self) -> None:
        self.updates += 1
        update = self.trainer.progress.update
        self.seen.states[update] = self.state()
        if update == SAVED_AT and self.path is not None:
            self.trainer.save_checkpoint(self.path)

    def state(self) -> dict[str, Any]:
        """All ranks call it."""
        engine = self._attached().engine
        weights = {name: whole(tensor).clone() for name, tensor in engine.strategy.state_dict(engine.module).items()}
        (optimizer,) = engine.optimizers
        found = by_name(optimizer, engine.names, engine.strategy)
        return {
            "weights": weights,
            "optimizer": {
                name: {key: whole(v).clone() if isinstance(v, Tensor) else v for key, v in values.items()}
                for name, values in found["state"].items()
            },
            "groups": found["groups"],
        }


def fit(place: Place, module: Zoo, origin: Path | None) -> Seen:
    """One fit to the last update, in the middle of an epoch."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(7, (2, SAMPLES), generator=generator)
    data = TensorDataset(torch.arange(SAMPLES), *tokens)
    torch.manual_seed(5 if origin is None else 99)  # the checkpoint's seed rules
    strategy: Any = {"name": "ddp", "find_unused_parameters": True} if place.strategy == "ddp" else place.strategy
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=place.world_size, max_steps=UPDATES, deterministic=True,
        accumulate_grad_batches=BATCHES // place.world_size, logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, BATCH_SIZE, shuffle=True), ckpt_path=origin)
    return module.seen


def write(place: Place, path: Path) -> Seen:
    """Task: an uninterrupted run, which saves on its way."""
    return fit(place, Zoo(path), None)


def read(place: Place, path: Path) -> Seen:
    """Task: a run that goes on from a checkpoint."""
    return fit(place, Zoo(), path)
