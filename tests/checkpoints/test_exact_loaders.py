"""Resumed in the middle of an epoch: loaders that own their position, and data that has none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scalar
import torch
import trivet
from chosen import chosen
from ranks import outcomes, run
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from trivet.data.sharding import already_sharded
from trivet.errors import CheckpointError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it


class Numbers(Dataset[Tensor]):
    """Read by index."""

    def __init__(self, first: int = 0, step: int = 1, length: int = 10) -> None:
        self.values = list(range(first, length * step, step))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(self.values[index]))


class Stream(IterableDataset[Tensor]):
    """Ten numbers; among workers each reads its part."""

    reads = 0

    def part(self) -> range:
        info = get_worker_info()
        return range(10) if info is None else range(info.id, 10, info.num_workers)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(float(number)) for number in self.part())


class Stateful(Stream):
    """With an iterator that knows where it stands."""

    def __iter__(self) -> Iterator[Tensor]:
        return Place(self)


class Place:
    """Where an iterator over a `Stateful` stands."""

    def __init__(self, data: Stateful) -> None:
        self.data, self.part, self.at = data, data.part(), 0

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> Tensor:
        if self.at == len(self.part):
            raise StopIteration
        self.at += 1
        self.data.reads += 1
        return torch.tensor(float(self.part[self.at - 1]))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Sees(scalar.Scalar):
    """``seen``: the samples of each micro-batch of this rank."""

    def __init__(self, path: Path | None = None, save_at: tuple[int, ...] = ()) -> None:
        super().__init__(lr=0.125)
        self.path, self.save_at = path, save_at
        self.seen: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.seen.append(batch.tolist())
        return super().training_step(batch, batch_idx)

    def on_update_end(self) -> None:
        super().on_update_end()
        if self.trainer.progress.update in self.save_at:
            self.trainer.save_checkpoint(f"{self.path}-{self.trainer.progress.update}")


def train(loader: Any, *, origin: str | None = None, **options: Any) -> Sees:
    """A fit of 3 epochs, which saves after each update where it begins afresh."""
    saves = tuple(options.pop("save_at", ()))
    module = Sees(options.pop("path", None), saves)
    scalar.trainer(max_epochs=3, **options).fit(module, loader, ckpt_path=origin)
    return module


def stateful(kind: str, workers: int) -> Any:
    torch.manual_seed(11)
    data = {"indexed": Numbers, "stream": Stateful}[kind]()
    return StatefulDataLoader(data, 2, shuffle=True if kind == "indexed" else None, num_workers=workers)


OPTIONS: list[dict[str, Any]] = [{}, {"limit_train_batches": 3}, {"accumulate_grad_batches": 2}]
EVERY = [(kind, options, workers) for kind in ("indexed", "stream") for options in OPTIONS for workers in (0, 2)]
FEW = [case for case in EVERY if not case[2] or case == ("stream", OPTIONS[1], 2) or case == ("indexed", OPTIONS[0], 2)]


@pytest.mark.parametrize(("kind", "options", "workers"), chosen("stateful loaders", EVERY, FEW))
def test_a_stateful_loader_goes_on_where_it_was(kind: str, options: Any, workers: int, tmp_path: Path) -> None:
    """Within an epoch, at its end, and at the end that a limit sets."""
    saves = (1, 3) if workers else (2, 3, 5)
    whole = train(stateful(kind, workers), path=tmp_path / "at", save_at=saves, **options)
    for update in saves:
        loader = stateful(kind, workers)
        torch.rand(update)
        rest = train(loader, origin=f"{tmp_path / 'at'}-{update}", **options)
        assert rest.history == whole.history[update:]
        assert rest.seen == whole.seen[len(whole.seen) - len(rest.seen) :]


def test_no_sample_of_a_stateful_stream_is_read_twice(tmp_path: Path) -> None:
    train(stateful("stream", 0), path=tmp_path / "at", save_at=(3,))
    loader = stateful("stream", 0)
    train(loader, origin=f"{tmp_path / 'at'}-3", max_steps=5)
    assert loader.dataset.reads == 4


def two_ranks(folder: Path, origin: str | None) -> list[list[int]]:
    """Task: each rank has its own part in a loader of its own."""
    torch.manual_seed(4)
    loader = StatefulDataLoader(Numbers(int(os.environ["RANK"]), 2, 8), 2, shuffle=True)
    module = train(already_sharded(loader), path=folder / "two", save_at=(3, 5), origin=origin, devices=2)
    return module.seen


def test_ranks_keep_their_own_positions_and_their_number(tmp_path: Path) -> None:
    whole = run(2, two_ranks, tmp_path, None)
    for update in (3, 5):
        rest = run(2, two_ranks, tmp_path, f"{tmp_path / 'two'}-{update}")
        assert rest == [one[update:] for one in whole]
    with pytest.raises(DataError, match=r"StatefulDataLoader over Numbers.*holds for 2 processes; this run has 1"):
        train(stateful("indexed", 0), origin=f"{tmp_path / 'two'}-3")


def test_a_stream_without_a_state_begins_the_epoch_anew_and_says_so_or_is_refused(tmp_path: Path) -> None:
    train(DataLoader(Stream(), 2), path=tmp_path / "at", save_at=(3, 5))
    with pytest.raises(CheckpointError, match=r"exact_resume=True, and .* Stream.* cannot go to batch 3.*StatefulData"):
        train(DataLoader(Stream(), 2), origin=f"{tmp_path / 'at'}-3", exact_resume=True)
    with pytest.warns(UserWarning, match="cannot go to batch 3.*epoch 0 begins anew"):
        rest = train(DataLoader(Stream(), 2), origin=f"{tmp_path / 'at'}-3", max_steps=5)
    assert rest.seen == [[0, 1], [2, 3]]


def test_what_ends_with_an_epoch_is_exact_also_for_a_stream(tmp_path: Path) -> None:
    callback = trivet.Checkpoint(tmp_path, filename="end")
    whole = train(DataLoader(Stream(), 2))
    scalar.trainer(max_epochs=1, enable_checkpointing=True, callbacks=[callback]).fit(Sees(), DataLoader(Stream(), 2))
    rest = train(DataLoader(Stream(), 2), origin=callback.last_model_path, exact_resume=True)
    assert rest.seen == whole.seen[5:]


def test_exact_resume_refuses_each_other_reason(tmp_path: Path) -> None:
    train(DataLoader(Numbers(), 2), path=tmp_path / "at", save_at=(3,))
    origin = f"{tmp_path / 'at'}-3"
    rest = train(DataLoader(Numbers(), 2), origin=origin, exact_resume=True)
    assert rest.seen[:2] == [[6, 7], [8, 9]]
    with pytest.raises(
        CheckpointError, match="precision was 'fp32' and is 'fp64'; deterministic was False and is True"
    ):
        train(DataLoader(Numbers(), 2), origin=origin, exact_resume=True, precision="fp64", deterministic=True)
    found = outcomes(train_on_two, origin)
    assert all("strategy was 'single' and is 'ddp'; world_size was 1 and is 2" in str(one) for one in found)


def train_on_two(origin: str) -> None:
    train(DataLoader(Numbers(), 2), origin=origin, exact_resume=True, devices=2)


@pytest.mark.parametrize(("first", "second"), [(DataLoader, StatefulDataLoader), (StatefulDataLoader, DataLoader)])
def test_another_kind_of_loader_is_refused(first: Any, second: Any, tmp_path: Path) -> None:
    train(first(Numbers(), 2), path=tmp_path / "at", save_at=(3,))
    with pytest.raises(DataError, match=r"position in a loader that .*, and this run has one that .*the same kind"):
        train(second(Numbers(), 2), origin=f"{tmp_path / 'at'}-3")
