"""Evaluation data: every sample once over all ranks (case C24)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from trivet.data.evaluation import EvalData
from trivet.data.sharding import already_sharded
from trivet.errors import DataError


class Numbers(Dataset[Any]):
    def __init__(self, length: int, noise: bool = False) -> None:
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return (index, random.random(), float(torch.rand(()))) if self.noise else index


def evaluate(loader: Any, rank: int = 0, world_size: int = 1, seed: int = 1, **more: Any) -> EvalData:
    return EvalData(loader, rank=rank, world_size=world_size, seed=seed, **more)


def plain(batch: Any) -> Any:
    return [plain(item) for item in batch] if isinstance(batch, (list, tuple)) else batch.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("workers", [0, 1])
def test_no_sample_twice_and_none_missing(world_size: int, batch_size: int, workers: int):
    loader = DataLoader(Numbers(5), batch_size=batch_size, num_workers=workers if world_size < 3 else 0)
    found: dict[int, list[int]] = {}
    for rank in range(world_size):
        data = evaluate(loader, rank, world_size)
        mine = list(data)
        assert len(mine) == len(data)
        for batch, number, samples in mine:
            assert number not in found
            assert samples == len(batch)
            found[number] = batch.tolist()
    assert [value for number in sorted(found) for value in found[number]] == [0, 1, 2, 3, 4]


def test_noise_is_the_same_in_each_run_and_at_each_world_size():
    loader = DataLoader(Numbers(6, noise=True), batch_size=2, shuffle=True)
    one = [plain(batch) for batch, _, _ in evaluate(loader)]
    assert len({noise for batch in one for noise in batch[1]}) == 6
    data = evaluate(loader)
    torch.rand(3)
    assert [plain(batch) for batch, _, _ in data] == one
    assert [plain(batch) for batch, _, _ in data] == one
    two = {number: plain(batch) for rank in range(2) for batch, number, _ in evaluate(loader, rank, 2)}
    assert [two[number] for number in sorted(two)] == one
    assert [plain(batch) for batch, _, _ in evaluate(loader, seed=2)] != one


@pytest.mark.parametrize(("limit", "expected"), [(1, [0, 1]), (0.5, [0, 1]), (0, []), (1.0, [0, 1, 2, 3, 4])])
def test_limits(limit: float, expected: list[int]):
    loader = DataLoader(Numbers(10), batch_size=2)
    found = [evaluate(loader, rank, 2, limit=limit) for rank in range(2)]
    assert sorted(number for data in found for _, number, _ in data) == expected
    assert sum(map(len, found)) == len(expected)


def test_set_epoch_is_not_called():
    calls: list[int] = []

    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            calls.append(epoch)

    class ToldStream(Stream):
        def set_epoch(self, epoch: int) -> None:
            calls.append(epoch)

    list(evaluate(DataLoader(Told(2))))
    list(evaluate(DataLoader(ToldStream(range(2)))))
    assert calls == []


def test_prebuilt_batches():
    loader = DataLoader(Numbers(3), batch_size=None)
    assert [(batch, number, samples) for rank in range(2) for batch, number, samples in evaluate(loader, rank, 2)] == [
        (0, 0, 1.0),
        (2, 2, 1.0),
        (1, 1, 1.0),
    ]


def test_a_distributed_sampler_is_refused():
    data = Numbers(5)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(DataError, match="Pass the plain sampler"):
        evaluate(DataLoader(data, sampler=sampler), 0, 2)


class Stream(IterableDataset[Any]):
    def __init__(self, values: range) -> None:
        self.values = values

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)


def test_iterable_data_follows_the_rules_of_training():
    loader = DataLoader(Stream(range(5)), batch_size=2)
    assert [(plain(b), n, s) for b, n, s in evaluate(loader)] == [([0, 1], 0, 2.0), ([2, 3], 1, 2.0), ([4], 2, 1.0)]
    with pytest.raises(DataError, match="already_sharded"):
        evaluate(loader, 0, 2)
    marked = evaluate(already_sharded(DataLoader(Stream(range(1, 5, 2)))), 1, 2)
    assert [(plain(b), n) for b, n, _ in marked] == [([1], 1), ([3], 3)]
    assert [batch for batch, _, _ in evaluate([[1], [2]], limit=1)] == [[1]]
    with pytest.raises(TypeError):
        len(evaluate(loader))


def test_an_empty_loader_evaluates_nothing():
    assert list(evaluate(DataLoader(Numbers(0)))) == []
