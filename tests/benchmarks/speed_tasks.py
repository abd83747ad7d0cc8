"""What every contender trains: models, batches and optimizers, and what it is asked to do beside the plain loop.

The data set reads the clock when a batch is asked for, so a step is timed in the same place for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Asked:
    """What a fit is asked to do. A contender's ``SUPPORTS`` names the fields that it can do."""

    bf16: bool = False
    clip: float | None = None
    callbacks: int = 0  # with hooks before and after a batch that do nothing
    empty_callbacks: int = 0  # without any hook
    metrics: int = 0  # logged in each step
    conveniences: bool = False  # progress bar, CSV logger, three metrics a step, a checkpoint for each epoch
    folder: Path = field(default=Path(), compare=False)

    @property
    def names(self) -> set[str]:
        """The fields that ask for something."""
        default = Asked()
        return {name for name in vars(default) if name != "folder" and getattr(self, name) != getattr(default, name)}


class Batches(Dataset[Any]):
    """A few batches in memory, used in turn."""

    def __init__(self, batches: list[Batch], steps: int, named: bool) -> None:
        self.batches, self.steps, self.named = batches, steps, named
        self.times: list[float] = []
        self.cpu: list[tuple[int, float]] = []  # the process's own time, after so many batches

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Any:
        if index in (self.steps // 10, self.steps - 1):
            self.cpu.append((len(self.times), time.process_time()))
        self.times.append(time.perf_counter())
        x, y = self.batches[index % len(self.batches)]
        return {"x": x, "labels": y} if self.named else (x, y)


@dataclass
class Task:
    """One training."""

    name: str
    build: Callable[[], nn.Module]
    batches: list[Batch]
    steps: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    epochs: int = 1
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    data: Batches | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def loader(self, *, named: bool = False) -> DataLoader[Any]:
        """``named``: batches are dicts, as Hugging Face's Trainer wants them."""
        self.data = Batches(self.batches, self.steps, named)
        return DataLoader(self.data, batch_size=None)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def tiny(steps: int = 2000, epochs: int = 1) -> Task:
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, 32, generator=generator), torch.randint(0, 2, (8,), generator=generator)) for _ in range(16)
    ]
    return Task("tiny", lambda: nn.Linear(32, 2), batches, steps, sgd, epochs)


class Many(nn.Module):
    """So many parameter tensors and almost no arithmetic."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)
        self.more = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(tensors - 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + torch.stack(list(self.more)).sum(0)
        return out


def many(tensors: int = 1000, steps: int = 60) -> Task:
    task = tiny(steps)
    task.name, task.build, task.optimizer = f"{tensors} tensors", lambda: Many(tensors), adamw
    return task


def digits_data() -> Batch:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def digits(epochs: int = 20) -> Task:
    x, y = digits_data()
    batches = list(zip(x.split(64), y.split(64), strict=True))[:28]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    return Task("digits, MLP", build, batches, 28, adamw, epochs)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 128, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])))
        return out


def next_byte(logits: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def gpt(steps: int = 20, batch: int = 4, length: int = 128) -> Task:
    import argparse

    text = Path(argparse.__file__).read_bytes()[: 16 * batch * (length + 1)]  # a text that every Python has
    ids = torch.tensor(list(text)).view(16, batch, length + 1)
    batches = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]
    return Task("GPT, 4 layers", GPT, batches, steps, adamw, loss=next_byte)


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        same = (inner, stride) == (outer, 1)
        self.skip = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inside)) + self.skip(x))


def resnet(steps: int = 20, batch: int = 16) -> Task:
    x, y = digits_data()
    x = functional.interpolate(x.view(-1, 1, 8, 8), size=(32, 32), mode="bilinear")[: 16 * batch]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1), Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    batches = list(zip(x.split(batch), y[: 16 * batch].split(batch), strict=True))
    return Task("small ResNet", build, batches, steps, adamw)
