"""Training data that each rank reads for itself: iterable data sets, loaders with a position, any iterable."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler
from trivet.data import stream as stream_module
from trivet.data import window as window_module
from trivet.data.sharding import already_sharded
from trivet.data.train import TrainData, Window
from trivet.errors import DataError


class Stream(IterableDataset[Any]):
    """The numbers of a range, or one rank's part of it, also among workers."""

    def __init__(self, length: int, rank: int = 0, world_size: int = 1, noise: bool = False) -> None:
        self.length, self.rank, self.world_size, self.noise = length, rank, world_size, noise

    def shard(self, rank: int, world_size: int) -> Stream:
        return Stream(self.length, rank, world_size, self.noise)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for value in range(self.rank, self.length, self.world_size):
            if value // self.world_size % workers == number:
                yield (value, random.random(), float(torch.rand(()))) if self.noise else value


def train(loader: Any, rank: int = 0, world_size: int = 1, accumulate: int = 1, **more: Any) -> TrainData:
    return TrainData(loader, rank=rank, world_size=world_size, accumulate=accumulate, seed=1, **more)


def plain(batch: Any) -> Any:
    if isinstance(batch, (list, tuple)):
        return [plain(item) for item in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def batches(data: TrainData, epoch: int = 0) -> list[list[Any]]:
    return [[plain(micro.batch) for micro in window.batches] for window in data.epoch(epoch)]


class Ranks:
    """Runs one function per rank in threads, with a sum over ranks that meets at a barrier."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world_size, self.calls = world_size, 0
        self.local = threading.local()
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.slots: list[list[float]] = [[] for _ in range(world_size)]
        for module in (stream_module, window_module):
            monkeypatch.setattr(module, "sum_over_ranks", self.sum)

    def sum(self, values: list[float]) -> list[float]:
        self.slots[self.local.rank] = values
        self.barrier.wait()
        result = [float(sum(column)) for column in zip(*self.slots, strict=True)]
        self.barrier.wait()
        return result

    def run(self, function: Any) -> list[Any]:
        """What the function returned on each rank, or the exception it raised."""
        results: list[Any] = [None] * self.world_size

        def work(rank: int) -> None:
            self.local.rank = rank
            try:
                results[rank] = function(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


# --------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_data_set_has_exact_samples(workers: int):
    data = train(DataLoader(Stream(5), batch_size=2, num_workers=workers), accumulate=3)
    (window,) = data.epoch(0)
    assert sorted(value for micro in window.batches for value in micro.batch.tolist()) == [0, 1, 2, 3, 4]
    assert [micro.samples for micro in window.batches] == [len(micro.batch) for micro in window.batches]
    assert window.samples == window.weight == 5
    assert sum(micro.weight or 0 for micro in window.batches) == pytest.approx(1)


def test_short_windows_and_limits():
    loader = DataLoader(Stream(10), batch_size=2)
    found = list(train(loader, accumulate=2).epoch(0))
    assert [[m.weight for m in w.batches] for w in found] == [[0.5, 0.5], [0.5, 0.5], [None]]
    assert [[m.index for m in w.batches] for w in found] == [[0, 1], [2, 3], [4]]
    limited = train(loader, limit=2)
    assert batches(limited) == [[[0, 1]], [[2, 3]]]
    assert [w.last for w in limited.epoch(1)] == [False, True]


@pytest.mark.parametrize("workers", [0, 2])
def test_noise_of_an_iterable_follows_from_epoch_and_position(workers: int):
    def run(epoch: int) -> Any:
        return batches(train(DataLoader(Stream(8, noise=True), batch_size=2, num_workers=workers)), epoch)

    first = run(1)
    torch.rand(3)
    assert run(1) == first
    assert run(2) != first
    assert len({noise for ((_, column, _),) in first for noise in column}) == 8


def test_prebuilt_batches_of_an_iterable_count_as_1():
    loader = DataLoader(Stream(3, noise=True), batch_size=None)
    data = train(loader, accumulate=2)
    found = list(data.epoch(0))
    assert [w.samples for w in found] == [2, 1]
    assert batches(data) == batches(train(loader, accumulate=2))


def test_a_list_of_batches_is_read_again_in_each_epoch_and_resumed():
    data = train([[1, 2], [3], [4]])
    assert [batches(data, epoch) for epoch in range(2)] == [[[[1, 2]], [[3]], [[4]]]] * 2
    assert data.num_batches == 3
    first, second = train([[1, 2], [3], [4]]), train([[1, 2], [3], [4]])
    next(first.epoch(1))
    second.load_state_dict(first.state_dict())
    found = list(second.epoch(1))
    assert [w.batches[0].batch for w in found] == [[3], [4]]
    assert [w.batches[0].index for w in found] == [1, 2]


def test_an_iterator_that_is_read_up_is_an_error():
    data = train(iter([[1], [2]]))
    assert data.num_batches is None
    assert batches(data) == [[[1]], [[2]]]
    with pytest.raises(DataError, match=r"list_iterator, an iterator that can be read only once.*when epoch 1 began"):
        batches(data, 1)


def test_weigh_of_a_stream():
    (window,) = train([[1, 2], [3]], accumulate=2, weigh=lambda batch: float(len(batch))).epoch(0)
    assert [m.weight for m in window.batches] == [2 / 3, 1 / 3]
    assert (window.samples, window.weight) == (2.0, 3.0)


@pytest.mark.parametrize("loader", [[], DataLoader(Stream(0), batch_size=2), iter(())])
def test_empty_streams_are_refused(loader: Any):
    with pytest.raises(DataError, match="gives no batch"):
        list(train(loader).epoch(0))


def test_a_stream_without_state_begins_its_epoch_anew_with_a_warning():
    first, second = (train(DataLoader(Stream(6), batch_size=2)) for _ in range(2))
    next(first.epoch(1))
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="cannot go to batch 1.*epoch 1 begins anew"):
        assert batches(second, 1) == [[[0, 1]], [[2, 3]], [[4, 5]]]
    third = train(DataLoader(Stream(6), batch_size=2))
    list(first.epoch(1))
    third.load_state_dict(first.state_dict())
    assert batches(third, 2) == [[[0, 1]], [[2, 3]], [[4, 5]]]


class Positioned:
    """A loader that owns its position."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.length:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_loader_that_owns_its_position_is_resumed_by_itself():
    first, second = train(Positioned(5), accumulate=2), train(Positioned(5), accumulate=2)
    next(first.epoch(0))
    state = first.state_dict()
    second.load_state_dict(state)
    found = list(second.epoch(0))
    assert [[m.batch for m in w.batches] for w in found] == [[3, 4], [5]]
    assert [[m.index for m in w.batches] for w in found] == [[2, 3], [4]]
    assert batches(second, 1) == [[1, 2], [3, 4], [5]]
    with pytest.raises(DataError, match="checkpoint holds for 1 processes; this run has 2"):
        train(already_sharded(Positioned(5)), 0, 2).load_state_dict(state)


# --------------------------------------------------------------------------------------------------- several processes


def test_what_cannot_be_shared_out_is_refused_with_both_remedies():
    class NoShard(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for loader in (DataLoader(NoShard()), [[1], [2]]):
        with pytest.raises(DataError, match=r"give the data set a method shard\(rank=.*already_sharded\(loader\)"):
            train(loader, 0, 2)
    with pytest.raises(DataError, match=r"Positioned owns its position.*already_sharded\(loader\)"):
        train(Positioned(3), 0, 2)


def test_a_shard_method_with_other_arguments_is_named():
    class Other(Stream):
        def shard(self, num_shards: int, index: int) -> Stream:  # type: ignore[override]
            return self

    with pytest.raises(DataError, match=r"Other.shard\(num_shards.*does not take \(rank=, world_size=\)"):
        train(DataLoader(Other(3)), 0, 2)


def test_a_borrowed_sample_weighs_nothing(monkeypatch: pytest.MonkeyPatch):
    loader = DataLoader(torch.arange(1).tolist(), batch_size=1)  # type: ignore[arg-type]

    def run(rank: int) -> Any:
        window = next(train(loader, rank, 2, weigh=lambda batch: 5.0).epoch(0))
        return window.weight, window.batches[0].weight

    assert Ranks(2, monkeypatch).run(run) == [(5.0, 2.0), (5.0, 0.0)]


def test_shards_are_read_by_their_ranks(monkeypatch: pytest.MonkeyPatch):
    loader = DataLoader(Stream(8), batch_size=2)
    found = Ranks(2, monkeypatch).run(lambda rank: list(train(loader, rank, 2, 2).epoch(0)))
    assert [[plain(m.batch) for w in windows for m in w.batches] for windows in found] == [
        [[0, 2], [4, 6]],
        [[1, 3], [5, 7]],
    ]
    assert [[m.weight for m in windows[0].batches] for windows in found] == [[0.5, 0.5]] * 2
    assert [windows[0].samples for windows in found] == [8, 8]


def uneven(monkeypatch: pytest.MonkeyPatch, policy: str, parts: list[list[Any]], accumulate: int = 1) -> list[Any]:
    def run(rank: int) -> list[Window]:
        data = train(already_sharded(parts[rank]), rank, len(parts), accumulate, uneven=policy, weigh=len)
        return list(data.epoch(0))

    return Ranks(len(parts), monkeypatch).run(run)


def test_uneven_parts_are_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch):
    for error in uneven(monkeypatch, "error", [["a", "b"], ["c"]]):
        assert isinstance(error, DataError)
        assert "in epoch 0 (batches so far: rank 0: 2, rank 1: 1)" in str(error)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_drop_stops_with_the_first(monkeypatch: pytest.MonkeyPatch, accumulate: int):
    found = uneven(monkeypatch, "drop", [["a", "bb", "c", "d"], ["ee", "f", "g"]], accumulate)
    assert [[m.batch for w in windows for m in w.batches] for windows in found] == [["a", "bb", "c"], ["ee", "f", "g"]]
    assert sum(w.weight for w in found[0]) == sum(w.weight for w in found[1]) == 8
    check_weights(found)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_join_takes_part_with_weight_0(monkeypatch: pytest.MonkeyPatch, accumulate: int):
    found = uneven(monkeypatch, "join", [["a", "bb", "c", "d"], ["ee"]], accumulate)
    assert [[m.batch for w in windows for m in w.batches] for windows in found] == [["a", "bb", "c", "d"], ["ee"] * 4]
    assert [m.weight for w in found[1] for m in w.batches][1:] == [0.0] * 3
    assert [m.samples for w in found[1] for m in w.batches] == [2.0, 0.0, 0.0, 0.0]
    assert all([m.last for m in w.batches][-1] for windows in found for w in windows)
    check_weights(found)


def check_weights(found: list[list[Window]]) -> None:
    for windows in zip(*found, strict=True):
        weights = [1.0 if m.weight is None else m.weight for w in windows for m in w.batches]
        assert sum(weights) == pytest.approx(len(found))
        assert len({len(w.batches) for w in windows}) == 1


@pytest.mark.parametrize("policy", ["error", "drop", "join"])
def test_a_rank_without_any_data_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch, policy: str):
    def run(rank: int) -> Any:
        return list(train(DataLoader(Stream(1), batch_size=1), rank, 2, uneven=policy).epoch(0))

    for error in Ranks(2, monkeypatch).run(run):
        assert isinstance(error, DataError)
        assert "rank 1 has no batch at all in epoch 0 (rank 0: 1, rank 1: 0)" in str(error)


def test_a_marked_loader_keeps_its_distributed_sampler(monkeypatch: pytest.MonkeyPatch):
    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            return index

    def run(rank: int) -> Any:
        data = Numbers()
        sampler: Any = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=False)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        return [
            (plain(w.batches[0].batch), w.batches[0].samples) for w in train(already_sharded(loader), rank, 2).epoch(0)
        ]

    assert Ranks(2, monkeypatch).run(run) == [[([0, 2], 2.0), ([4], 1.0)], [([1, 3], 2.0), ([5], 1.0)]]


def test_a_shuffle_at_the_first_read_is_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch):
    class Shuffled(Stream):
        def shard(self, rank: int, world_size: int) -> Stream:
            return Shuffled(self.length, rank, world_size)

        def __iter__(self) -> Iterator[Any]:
            yield from torch.randperm(self.length).tolist()[self.rank :: self.world_size]

    seen: list[int] = []
    for rank in range(2):  # one after the other: the generators are this process's
        data = train(DataLoader(Shuffled(8), batch_size=2), rank, 2)
        monkeypatch.setattr(stream_module, "sum_over_ranks", lambda values: [values[0] or values[1]] * 2 + values[2:])
        seen += [value for (batch,) in batches(data) for value in batch]
    assert sorted(seen) == list(range(8))


def _gloo(rank: int, path: str, queue: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        loader = already_sharded(Positioned(3))
        data = TrainData(loader, rank=rank, world_size=2, accumulate=1, seed=1, weigh=lambda batch: batch + rank)
        iterator = data.epoch(0)
        window = next(iterator)
        loader.loader.position += rank
        state = data.state_dict()
        queue.put((rank, window.weight, window.batches[0].weight, state["loader"]))
    finally:
        torch.distributed.destroy_process_group()


def test_with_a_real_process_group(tmp_path: Any):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_gloo, args=(rank, str(tmp_path / "store"), queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = sorted(queue.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    states = [{"state": {"position": position}, "left": True} for position in (1, 2)]
    assert found == [(0, 3.0, 2 / 3, states), (1, 3.0, 4 / 3, states)]
