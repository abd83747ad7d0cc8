"""Samplers that remember something from epoch to epoch: resumed anywhere, the order is the one of the whole run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import scalar
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler
from trivet.errors import CheckpointError

N = 8


class Counts(Sampler[int]):
    """Begins one further in each epoch, by a number of its own; counts when it is asked, not when it is read."""

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter([(index + self.calls) % N for index in range(N)])

    def __len__(self) -> int:
        return N


class Shuffles(Counts):
    """Shuffles its list in place, so that each epoch follows from the one before."""

    def __init__(self) -> None:
        self.indices = list(range(N))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        yield from self.indices


class Arrays(Counts):
    """The same of an array, a tensor and a deque, each adding to what it was."""

    def __init__(self) -> None:
        self.array, self.tensor, self.deque = numpy.arange(N)[::-1], torch.arange(N), deque(range(N))

    def __iter__(self) -> Iterator[int]:
        numpy.random.shuffle(self.array)
        self.tensor = self.tensor[torch.randperm(N)]
        self.deque.rotate(1)
        for one in range(N):
            yield int(self.array[self.tensor[self.deque[one]]])


class Batches(Sampler[list[int]]):
    """A batch sampler around a sampler, with a generator inside of the inner one and a counter of its own."""

    def __init__(self) -> None:
        self.inner, self.batch, self.given = Drawn(), 2, 0

    def __iter__(self) -> Iterator[list[int]]:
        for batch in BatchSampler(self.inner, self.batch, drop_last=False):
            self.given += 1
            yield batch if self.given % 3 else batch[::-1]

    def __len__(self) -> int:
        return N // 2


class Drawn(Counts):
    def __init__(self) -> None:
        self.own = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        yield from self.own.sample(range(N), N)


class Opaque(Counts):
    """Keeps what nobody can store."""

    def __init__(self) -> None:
        self.place = iter(range(100))

    def __iter__(self) -> Iterator[int]:
        start = next(self.place)
        yield from ((index + start) % N for index in range(N))


class Says(Opaque):
    """The same, with a state that it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.at += 1
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.place = state["at"], iter(range(state["at"], 100))


class Sees(scalar.Scalar):
    def __init__(self, path: Path | None = None) -> None:
        super().__init__(lr=0.125)
        self.path, self.seen = path, list[list[float]]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.seen.append(batch.tolist())
        return super().training_step(batch, batch_idx)

    def on_update_end(self) -> None:
        if self.path is not None:
            self.trainer.save_checkpoint(f"{self.path}-{self.trainer.progress.update}")


def train(sampler: Any, path: Path | None = None, origin: str | None = None, **options: Any) -> list[list[float]]:
    kind = "sampler" if isinstance(sampler, Counts) else "batch_sampler"
    size = {"batch_size": 2} if kind == "sampler" else {}
    workers = options.pop("workers", 0)
    keeps = {"num_workers": workers, "persistent_workers": True} if workers else {}
    module = Sees(path)
    loader: Any = DataLoader(scalar.Numbers(N), **{kind: sampler}, **size, **keeps)
    scalar.trainer(max_epochs=3, **options).fit(module, loader, ckpt_path=origin)
    return module.seen


@pytest.mark.parametrize("kind", [Counts, Shuffles, Arrays, Batches, Drawn, Says])
def test_the_order_goes_on(kind: Any, tmp_path: Path) -> None:
    whole = train(kind(), tmp_path / "at")
    assert whole[:4] != whole[4:8] != whole[8:]
    for update in (4, 6):  # at an epoch's end, within the second
        torch.rand(update)
        assert train(kind(), origin=f"{tmp_path / 'at'}-{update}", exact_resume=True) == whole[update:]


def test_the_order_goes_on_with_workers_that_live_on(tmp_path: Path) -> None:
    """Which torch asks the sampler for twice when it starts them."""
    whole = train(Counts(), tmp_path / "at", workers=1)
    assert train(Counts(), origin=f"{tmp_path / 'at'}-6", workers=1) == whole[6:]


def test_what_cannot_be_stored_is_refused_where_exactness_is_asked_for(tmp_path: Path) -> None:
    train(Opaque(), tmp_path / "at")
    origin = f"{tmp_path / 'at'}-6"
    with pytest.raises(CheckpointError, match=r"exact_resume=True.*sampler Opaque keeps 'place', a range_iterator, of"):
        train(Opaque(), origin=origin, exact_resume=True)
    assert len(train(Opaque(), origin=origin)) == 6
    circle: Any = Counts()
    circle.own = [circle]
    circle.own[0] = circle.own
    with pytest.raises(CheckpointError, match="the sampler Counts keeps 'own', a list, of which nobody knows"):
        train(circle, origin=origin, exact_resume=True)


def test_what_a_sampler_has_not_changed_is_this_runs(tmp_path: Path) -> None:
    """Another batch size, say, is not overruled by the checkpoint's."""
    train(Batches(), tmp_path / "at")
    other = Batches()
    other.batch = 4
    rest = train(other, origin=f"{tmp_path / 'at'}-4")
    assert [len(batch) for batch in rest] == [4] * 4
