"""Training data that is read by index: dealing, order, seeds, resume."""

from __future__ import annotations

import io
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from trivet.data.dealing import deal, windows
from trivet.data.loader_copy import copy_loader
from trivet.data.sharding import already_sharded, derive_accumulation
from trivet.data.train import TrainData, Window
from trivet.errors import ConfigurationError, DataError


class Numbers(Dataset[Any]):
    """Sample i is i, with noise of three generators; counts what is read in this process."""

    def __init__(self, length: int, noise: bool = False) -> None:
        self.length, self.noise, self.reads = length, noise, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if not self.noise:
            return index
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def train(
    loader: Any, rank: int = 0, world_size: int = 1, accumulate: int = 1, seed: int = 1, **more: Any
) -> TrainData:
    return TrainData(loader, rank=rank, world_size=world_size, accumulate=accumulate, seed=seed, **more)


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def batches(data: TrainData, epoch: int = 0) -> list[list[Any]]:
    return [[plain(micro.batch) for micro in window.batches] for window in data.epoch(epoch)]


def flat(data: TrainData, epoch: int = 0) -> list[Any]:
    return [sample for window in batches(data, epoch) for batch in window for sample in batch]


def rows(data: TrainData, epoch: int = 0) -> dict[int, tuple[float, ...]]:
    """By sample: its noise."""
    found: dict[int, tuple[float, ...]] = {}
    for window in data.epoch(epoch):
        for micro in window.batches:
            if micro.samples:
                for row in zip(*(column.tolist() for column in micro.batch), strict=True):
                    assert row[0] not in found
                    found[int(row[0])] = row[1:]
    return found


# ------------------------------------------------------------------------------------------------------------- dealing


def test_whole_batches_are_dealt_in_turns():
    loader = DataLoader(Numbers(16), batch_size=2)
    ranks = [batches(train(loader, rank, 2, 2)) for rank in range(2)]
    assert ranks[0] == [[[0, 1], [4, 5]], [[8, 9], [12, 13]]]
    assert ranks[1] == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]


def test_a_window_that_does_not_divide_is_cut_by_samples():
    loader = DataLoader(Numbers(10), batch_size=2)  # 5 batches, windows of 4 and 1
    ranks = [list(train(loader, rank, 2, 2).epoch(0)) for rank in range(2)]
    last = [windows_[-1] for windows_ in ranks]
    assert [[plain(m.batch) for m in w.batches] for w in last] == [[[8]], [[9]]]
    assert [w.samples for w in last] == [2, 2]
    assert [w.last for w in ranks[0]] == [False, True]
    assert [[m.index for m in w.batches] for w in ranks[0]] == [[0, 1], [2]]
    assert [[m.last for m in w.batches] for w in ranks[0]] == [[False, True], [True]]


def test_a_rank_without_work_borrows_a_sample_with_weight_0():
    loader = DataLoader(Numbers(5), batch_size=2)
    ranks = [list(train(loader, rank, 3, 1).epoch(0)) for rank in range(3)]
    assert [len(windows_) for windows_ in ranks] == [1, 1, 1]
    assert [plain(w[0].batches[0].batch) for w in ranks] == [[0, 1], [2, 3], [4]]
    assert [w[0].batches[0].weight for w in ranks] == [1.2, 1.2, 0.6]
    small = [next(iter(train(DataLoader(Numbers(1)), rank, 2, 1).epoch(0))).batches[0] for rank in range(2)]
    assert [(plain(m.batch), m.weight, m.samples) for m in small] == [([0], 2.0, 1), ([0], 0.0, 0)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[2], [2, 2, 1], [3, 1, 4, 1, 5], [1]])
def test_dealing_loses_nothing_and_weights_add_up(world_size: int, sizes: list[int]):
    window, begin = [], 0
    for size in sizes:
        window.append(list(range(begin, begin + size)))
        begin += size
    dealt = [deal(window, rank, world_size) for rank in range(world_size)]
    pieces = [piece for pieces, _ in dealt for piece in pieces if piece.samples]
    assert sorted(index for piece in pieces for index in piece.indices) == list(range(begin))
    assert {total for _, total in dealt} == {begin}
    assert {len(pieces) for pieces, _ in dealt} == {-(-len(sizes) // world_size)}
    assert sum(1.0 if piece.weight is None else piece.weight for piece in pieces) == pytest.approx(world_size)
    assert all(window_index == piece.indices[0] for piece in pieces for window_index in [piece.offset])
    if len(sizes) % world_size:
        counts = [piece.samples for pieces, _ in dealt for piece in pieces]
        assert max(counts) - min(counts) <= 1


def test_windows_look_ahead_by_indices_only():
    assert list(windows(iter("abcde"), 2)) == [(["a", "b"], False), (["c", "d"], False), (["e"], True)]
    assert list(windows(iter(""), 2)) == []


def test_short_windows_and_ragged_batches_weigh_by_samples():
    loader = DataLoader(Numbers(5), batch_size=2)
    found = list(train(loader, accumulate=2).epoch(0))
    assert [[m.weight for m in w.batches] for w in found] == [[0.5, 0.5], [None]]
    assert [[m.samples for m in w.batches] for w in found] == [[2, 2], [1]]
    whole = next(train(loader, accumulate=3).epoch(0))
    assert [m.weight for m in whole.batches] == [0.4, 0.4, 0.2]
    assert (whole.samples, whole.weight) == (5, 5)


def test_weigh_replaces_samples():
    loader = DataLoader(Numbers(4), batch_size=2)
    window = next(train(loader, accumulate=2, weigh=lambda batch: batch.sum()).epoch(0))
    assert [m.weight for m in window.batches] == [1 / 6, 5 / 6]
    assert [m.samples for m in window.batches] == [1.0, 5.0]
    assert (window.samples, window.weight) == (4, 6.0)
    unknown = next(train(loader, accumulate=2, weigh=lambda batch: None).epoch(0))
    assert [m.weight for m in unknown.batches] == [0.5, 0.5]
    with pytest.raises(DataError, match="expected a positive number"):
        next(train(loader, weigh=lambda batch: 0.0).epoch(0))


def test_counts():
    data = train(DataLoader(Numbers(11), batch_size=2), world_size=2, accumulate=2)
    assert (data.num_batches, data.num_updates, data.batches_per_update, data.global_batch_size) == (3, 2, 4, 8)
    assert len(list(data.epoch(0))) == 2


@pytest.mark.parametrize(
    ("limit", "world_size", "expected"), [(2, 1, 2), (2, 2, 2), (0.5, 1, 3), (9, 1, 6), (1.0, 1, 6), (0, 1, 0)]
)
def test_limits_count_batches_per_rank_or_a_fraction(limit: float, world_size: int, expected: int):
    data = train(DataLoader(Numbers(12), batch_size=2), world_size=world_size, limit=limit)
    found = list(data.epoch(0))
    assert sum(len(w.batches) for w in found) == expected == data.num_batches
    assert [w.last for w in found] == [False] * (expected - 1) + [True] * (expected > 0)


def test_a_limit_that_is_none_is_refused():
    with pytest.raises(DataError, match=r"the limit 0.1 of 6 batches is none"):
        train(DataLoader(Numbers(12), batch_size=2), limit=0.1)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def test_an_endless_sampler():
    loader = DataLoader(Numbers(3), batch_size=2, sampler=Endless())
    data = train(loader)
    assert data.num_batches is None
    assert data.num_updates is None
    assert plain(next(data.epoch(0)).batches[0].batch) == [1, 1]
    assert batches(train(loader, limit=2)) == [[[1, 1]], [[1, 1]]]
    with pytest.raises(DataError, match="fraction of an epoch without a known length"):
        train(loader, limit=0.5).num_batches  # noqa: B018


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(0)),
        DataLoader(Numbers(3), batch_size=4, drop_last=True),
        DataLoader(Numbers(3), batch_sampler=[]),
    ],
)
def test_empty_loaders_are_refused_before_training(loader: Any):
    with pytest.raises(DataError, match="gives no batch: DataLoader over Numbers with"):
        train(loader)


def test_a_sampler_without_length_that_turns_out_empty():
    class Nothing(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(DataError, match="gives no batch in epoch 0"):
        list(train(DataLoader(Numbers(3), sampler=Nothing())).epoch(0))


# --------------------------------------------------------------------------------------------------- prebuilt batches


@pytest.mark.parametrize("workers", [0, 1])
def test_prebuilt_batches_are_dealt_whole(workers: int):
    loader = DataLoader(Numbers(3), batch_size=None, num_workers=workers)
    ranks = [list(train(loader, rank, 2).epoch(0)) for rank in range(2)]
    assert [[w.batches[0].batch for w in r] for r in ranks] == [[0, 2], [1, 2]]
    assert [[w.batches[0].weight for w in r] for r in ranks] == [[None, 2.0], [None, 0.0]]
    assert [w.samples for w in ranks[0]] == [2, 1]


def test_lists_of_indices_without_automatic_batching_have_known_samples():
    data = TensorDataset(torch.arange(5))
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), 2, False))
    window = next(train(loader, accumulate=3).epoch(0))
    assert [m.samples for m in window.batches] == [2, 2, 1]
    assert [m.batch[0].tolist() for m in window.batches] == [[0, 1], [2, 3], [4]]


# --------------------------------------------------------------------------------------------------------------- order


class LateSampler(Sampler[int]):
    """Draws from a global generator at every sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield random.randrange(100) * 100 + int(np.random.randint(10)) * 10 + int(torch.randint(10, ()))

    def __len__(self) -> int:
        return self.length


def order_loaders() -> dict[str, DataLoader[Any]]:
    data = Numbers(10_000)
    small = Numbers(12)
    return {
        "shuffle": DataLoader(small, batch_size=2, shuffle=True),
        "late": DataLoader(data, batch_size=2, sampler=LateSampler(12)),
        "weighted": DataLoader(small, batch_size=2, sampler=WeightedRandomSampler(torch.ones(12), 12)),
        "replacement": DataLoader(small, batch_size=2, sampler=RandomSampler(small, replacement=True)),
        "prebuilt": DataLoader(small, batch_size=None, shuffle=True, collate_fn=lambda x: [x]),
        "batch_sampler": DataLoader(small, batch_sampler=BatchSampler(RandomSampler(small), 2, True)),
    }


@pytest.mark.parametrize("name", list(order_loaders()))
def test_order_follows_from_seed_and_epoch_and_nothing_else(name: str):
    def run(epoch: int, seed: int = 1, noise: bool = False) -> list[Any]:
        found = []
        for window in train(order_loaders()[name], seed=seed).epoch(epoch):
            found.append(plain(window.batches[0].batch))
            if noise:
                random.random(), np.random.rand(), torch.rand(3)
        return found

    torch.manual_seed(5)
    first = run(3)
    torch.manual_seed(6)
    assert run(3, noise=True) == first
    assert run(4) != first
    assert run(3, seed=2) != first


@pytest.mark.parametrize("world_size", [2, 3])
def test_another_world_size_keeps_order_and_global_batches(world_size: int):
    loader = DataLoader(Numbers(30), batch_size=1, shuffle=True)
    one = batches(train(loader, accumulate=6), 2)
    ranks = [batches(train(loader, rank, world_size, 6 // world_size), 2) for rank in range(world_size)]
    many = [[batch for turn in zip(*parts, strict=True) for batch in turn] for parts in zip(*ranks, strict=True)]
    assert many == one


class Eager(Sampler[list[int]]):
    """A batch sampler that draws in __iter__ itself."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(12, generator=self.generator).view(6, 2).tolist())

    def __len__(self) -> int:
        return 6


def own_generator(kind: str, workers: int = 0, persistent: bool = False) -> DataLoader[Any]:
    generator, data = torch.Generator().manual_seed(42), TensorDataset(torch.arange(12))
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    if kind == "loader":
        return DataLoader(data, batch_size=2, shuffle=True, generator=generator, **more)
    if kind == "sampler":
        return DataLoader(data, batch_size=2, sampler=RandomSampler(data, generator=generator), **more)
    if kind == "replacement":
        sampler = RandomSampler(data, replacement=True, num_samples=40, generator=generator)
        return DataLoader(data, batch_size=2, sampler=sampler, generator=generator, **more)
    if kind == "eager":
        return DataLoader(data, batch_sampler=Eager(generator), generator=generator, **more)
    sampler = RandomSampler(data, generator=generator)
    return DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False), generator=generator, **more)


def first_column(data: TrainData, epoch: int) -> list[list[int]]:
    return [m.batch[0].tolist() for w in data.epoch(epoch) for m in w.batches]


@pytest.mark.parametrize("kind", ["loader", "sampler", "replacement", "batch_sampler", "eager"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_generator_of_the_users_gives_the_order_of_plain_pytorch(kind: str, workers: int, persistent: bool):
    loader = own_generator(kind, workers, persistent)
    expected = [[batch[0].tolist() for batch in loader] for _ in range(3)]
    data = train(own_generator(kind, workers, persistent))
    assert [first_column(data, epoch) for epoch in range(3)] == expected


@pytest.mark.parametrize("kind", ["loader", "replacement", "eager"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
@pytest.mark.parametrize("stop", [(1, 0), (1, 2), (0, 6)])
def test_resume_with_a_generator_of_the_users(kind: str, workers: int, persistent: bool, stop: tuple[int, int]):
    if kind == "replacement" and stop == (0, 6):
        stop = (0, 20)
    whole = train(own_generator(kind, workers, persistent))
    expected = [first_column(whole, epoch) for epoch in range(3)]
    first = train(own_generator(kind, workers, persistent))
    for epoch in range(stop[0]):
        first_column(first, epoch)
    if stop[1]:
        iterator = first.epoch(stop[0])
        for _ in range(stop[1]):
            next(iterator)
    second = train(own_generator(kind, workers, persistent))
    second.load_state_dict(first.state_dict())
    assert first_column(second, stop[0]) == expected[stop[0]][stop[1] :]
    assert first_column(second, stop[0] + 1) == expected[stop[0] + 1]


def test_resume_without_the_persistent_workers_of_the_first_run():
    whole = train(own_generator("loader", 1, True))
    expected = [first_column(whole, epoch) for epoch in range(2)]
    first, second = train(own_generator("loader", 1, True)), train(own_generator("loader"))
    first_column(first, 0)
    next(first.epoch(1))
    second.load_state_dict(first.state_dict())
    assert first_column(second, 1) == expected[1][1:]


def test_going_back_in_one_process_starts_new_workers():
    data = train(own_generator("loader", 1, True))
    state = data.state_dict()
    expected = [first_column(data, epoch) for epoch in range(2)]
    data.load_state_dict(state)
    assert [first_column(data, epoch) for epoch in range(2)] == expected


def test_numpy_and_python_generators_of_a_sampler_are_resumed_and_are_plain_data():
    class Own(Sampler[int]):
        def __init__(self) -> None:
            self.one, self.two, self.three = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)

        def __iter__(self) -> Iterator[int]:
            yield from (self.one.randrange(1000), int(self.two.integers(1000)), int(self.three.randint(1000)))

        def __len__(self) -> int:
            return 3

    def loader() -> DataLoader[Any]:
        return DataLoader(Numbers(1000), sampler=Own())

    whole = train(loader())
    expected = [flat(whole, epoch) for epoch in range(3)]
    first, second = train(loader()), train(loader())
    flat(first, 0)
    iterator = first.epoch(1)
    next(iterator)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert flat(second, 1) == expected[1][1:]
    assert flat(second, 2) == expected[2]


def test_an_array_of_a_sampler_is_copied_no_more_than_once():
    class Keeps(SequentialSampler):
        array = None

    sampler = Keeps(Numbers(4))
    sampler.array = np.arange(100_000)
    data = train(DataLoader(Numbers(4), sampler=sampler))
    sampler.array[0] = 7
    tracemalloc.start()  # which sees what numpy allocates
    try:
        state = data.state_dict()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < sampler.array.nbytes / 2, "the one copy is torch's"
    kept = next(value for name, value in state["generators"].items() if name.endswith(".array"))
    sampler.array[0] = 8
    assert int(kept[0]) == 7, "it shares nothing with the sampler's"


def test_set_epoch_is_called_on_samplers_and_data_set():
    calls: list[tuple[str, int]] = []

    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("dataset", epoch))

    class ToldSampler(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("sampler", epoch))

    data = Told(2)
    list(train(DataLoader(data, sampler=ToldSampler(data))).epoch(3))
    assert sorted(calls) == [("dataset", 3), ("sampler", 3)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_distributed_sampler_is_refused(world_size: int):
    data = Numbers(4)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(DataError, match=r"DistributedSampler with num_replicas=2.*Pass the plain sampler"):
        train(loader, world_size=world_size)
    alone = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    assert flat(train(DataLoader(data, sampler=alone))) == [0, 1, 2, 3]


# --------------------------------------------------------------------------------------------------------------- seeds


def test_noise_depends_on_epoch_and_position_alone():
    loader = DataLoader(Numbers(12, noise=True), batch_size=2, shuffle=True)
    one = rows(train(loader, accumulate=3), 1)
    assert len(one) == 12
    assert len(set(one.values())) == 12
    workers = DataLoader(Numbers(12, noise=True), batch_size=2, shuffle=True, num_workers=2)
    assert rows(train(workers, accumulate=3), 1) == one
    for world_size, accumulate in ((3, 1), (2, 2)):
        joined: dict[int, Any] = {}
        for rank in range(world_size):
            joined |= rows(train(loader, rank, world_size, accumulate), 1)
        assert joined == one
    assert rows(train(loader, accumulate=3), 2) != one
    assert rows(train(loader, accumulate=3, seed=2), 1) != one


def test_noise_of_a_subset_is_seeded_by_sample():
    loader = DataLoader(Subset(Numbers(12, noise=True), range(12)), batch_size=3)
    other = DataLoader(Subset(Numbers(12, noise=True), range(12)), batch_size=4)
    assert rows(train(loader)) == rows(train(other))


def noisy_collate(samples: list[Any]) -> torch.Tensor:
    return torch.rand(len(samples))


def test_a_random_collate_follows_from_the_position():
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, collate_fn=noisy_collate)
    first = batches(train(loader))
    assert first[0] != first[1]
    one, two = train(loader), train(loader)
    next(one.epoch(0))
    two.load_state_dict(one.state_dict())
    assert batches(two) == first[1:]


class Whole(Numbers):
    """Reads a batch in one call, without iterating over the indices."""

    mark = "user's"

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        noise = torch.rand(len(indices))
        return list(zip(indices, noise.tolist(), strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_data_sets_that_read_whole_batches_are_seeded_by_batch(workers: int):
    data = train(DataLoader(Whole(6), batch_size=2, num_workers=workers))
    first = rows(data, 1)
    torch.rand(3)
    assert rows(train(DataLoader(Whole(6), batch_size=2)), 1) == first
    assert len(set(first.values())) == 6


def test_the_stand_in_for_such_a_data_set_hands_everything_on():
    seen: list[Any] = []

    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            self.dataset.mark = "set"  # type: ignore[attr-defined]
            seen.append((self.dataset.mark, len(self.dataset), self.dataset[1]))  # type: ignore[attr-defined,arg-type]
            return super().__iter__()

    data = Whole(4)
    list(train(Loader(data, batch_size=2)).epoch(0))
    assert seen == [("set", 4, 1)]
    assert data.mark == "set"


@pytest.mark.parametrize("workers", [0, 1])
def test_prebuilt_batches_are_seeded(workers: int):
    loader = DataLoader(Numbers(4, noise=True), batch_size=None, num_workers=workers)
    first = [w.batches[0].batch for w in train(loader).epoch(1)]
    torch.rand(3)
    assert [w.batches[0].batch for w in train(DataLoader(Numbers(4, noise=True), batch_size=None)).epoch(1)] == first


class Rare(Numbers):
    """Draws for some samples only."""

    def __init__(self, length: int, drawn: tuple[int, ...]) -> None:
        super().__init__(length)
        self.drawn = drawn

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        noise = (random.random(), float(np.random.randn())) if index in self.drawn else (0.0, 0.0)
        return index, float(torch.rand(())), *noise


@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_first_draw_after_many_reads_has_its_seed(batch_size: int | None):
    def read(*drawn: int, workers: int = 0) -> tuple[dict[int, Any], int]:
        data = Rare(200, drawn)
        found: dict[int, Any] = {}
        for window in train(DataLoader(data, batch_size=batch_size, num_workers=workers)).epoch(0):
            batch = window.batches[0].batch
            found |= {
                index: rest
                for index, *rest in ([batch] if batch_size is None else zip(*map(plain, batch), strict=True))
            }
            random.random()  # what is drawn between reads does not matter
            np.random.rand()
        return found, data.reads

    rare, reads = read(150, 160)
    assert reads == 201  # one was done again
    always, reads = read(0, 150, 160)
    assert reads == 200
    assert always.pop(0) != rare.pop(0)
    assert rare == always
    assert len({tuple(noise) for noise in rare.values()}) == 199
    others, _ = read(150, 160, workers=1)
    assert {**others, 0: 0} == {**rare, 0: 0}


def collate_that_draws(samples: list[Any]) -> Any:
    return samples, random.random(), float(np.random.rand())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_may_draw_after_many_quiet_reads(workers: int):
    def read(skip: int) -> list[Any]:
        data = train(DataLoader(Numbers(200), batch_size=2, num_workers=workers, collate_fn=collate_that_draws))
        data.load_state_dict({**data.state_dict(), "position": skip})
        return batches(data)

    assert read(0)[-10:] == read(180)


def init_worker_of_stand_in(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Numbers)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_stand_in_passes_for_the_users_data_set(context: str):
    more: dict[str, Any] = {"worker_init_fn": init_worker_of_stand_in, "multiprocessing_context": context}
    loader = DataLoader(Numbers(4), batch_size=2, num_workers=1, **more)
    assert batches(train(loader)) == [[[0, 1]], [[2, 3]]]


# --------------------------------------------------------------------------------------------------- the user's loader


class OwnLoader(DataLoader[Any]):
    """A subclass with another constructor, attributes and __iter__."""

    def __init__(self, name: str, data: Any, **more: Any) -> None:
        super().__init__(data, **more)
        self.name = name

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [f"{self.name}{number}" for number in batch]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def init_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Numbers)
    info.dataset.length += 100


def test_subclass_attributes_and_iter_are_kept():
    loader = OwnLoader("x", Numbers(4), batch_size=2, collate_fn=as_list)
    assert batches(train(loader, 1, 2)) == [[["x2", "x3"]]]
    assert [list(batch) for batch in loader] == [["x0", "x1"], ["x2", "x3"]]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_context_and_init_function_are_kept(context: str):
    loader = DataLoader(
        Numbers(6),
        batch_size=2,
        num_workers=1,
        multiprocessing_context=context,
        worker_init_fn=init_worker,
        collate_fn=as_list,
        persistent_workers=True,
    )
    data = train(loader)
    assert [flat(data, epoch) for epoch in range(2)] == [list(range(6))] * 2


def test_a_copy_does_not_share_running_workers():
    loader = DataLoader(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 3
    assert batches(train(loader, 1, 3)) == [[[2, 3]]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_torch_refuses_assignment_so_that_the_copy_is_needed():
    loader = DataLoader(Numbers(6), batch_size=2)
    with pytest.raises(ValueError, match="should not be set after DataLoader is initialized"):
        loader.batch_sampler = [[0]]  # type: ignore[assignment]
    twin = copy_loader(loader, batch_sampler=[[0]])
    assert [batch.tolist() for batch in twin] == [[0]]
    assert len(loader) == 3


def test_batches_that_come_out_of_order_are_put_in_order():
    loader = DataLoader(Numbers(40), batch_size=2, num_workers=2, in_order=False)
    assert flat(train(loader)) == list(range(40))


def test_loaders_that_drop_or_add_batches_are_refused():
    class Half(DataLoader[Any]):
        def __iter__(self) -> Any:
            for number, batch in enumerate(super().__iter__()):
                if number % 2 == 0:
                    yield batch

    class Twice(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch
                yield batch

    with pytest.raises(DataError, match=r"Twice gave more batches.*already_sharded"):
        list(train(Twice(Numbers(4))).epoch(0))
    with pytest.raises(DataError, match=r"Half gave fewer batches.*already_sharded"):
        list(train(Half(Numbers(4)), accumulate=3).epoch(0))
    assert flat(train(already_sharded(Half(Numbers(4))))) == [0, 2]


# -------------------------------------------------------------------------------------------------------------- resume


def resumed(make: Any, first: dict[str, Any], second: dict[str, Any], windows_read: int, epoch: int) -> list[Any]:
    """What the second run reads in that epoch after the first has read some windows of it."""
    one = train(make(), **first)
    iterator = one.epoch(epoch)
    for _ in range(windows_read):
        next(iterator)
    two = train(make(), **second)
    two.load_state_dict(one.state_dict())
    return list(two.epoch(epoch))


@pytest.mark.parametrize("name", list(order_loaders()))
@pytest.mark.parametrize("windows_read", [1, 3])
def test_resume_in_the_middle_reads_nothing_twice(name: str, windows_read: int):
    def make() -> DataLoader[Any]:
        return order_loaders()[name]

    whole = [plain(w.batches[0].batch) for w in train(make()).epoch(2)]
    found = resumed(make, {}, {}, windows_read, 2)
    assert [plain(w.batches[0].batch) for w in found] == whole[windows_read:]
    assert [w.batches[0].index for w in found] == list(range(windows_read, len(whole)))


def test_skipping_reads_no_sample():
    data = Numbers(20)
    first, second = (train(DataLoader(data, batch_size=2, shuffle=True)) for _ in range(2))
    iterator = first.epoch(0)
    for _ in range(7):
        next(iterator)
    assert data.reads == 14
    second.load_state_dict(first.state_dict())
    list(second.epoch(0))
    assert data.reads == 20


@pytest.mark.parametrize(("before", "after"), [((1, 4), (2, 1)), ((2, 2), (1, 1)), ((2, 1), (4, 9)), ((1, 3), (2, 1))])
def test_resume_at_another_world_size_keeps_the_global_batch(before: tuple[int, int], after: tuple[int, int]):
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(23, noise=True), batch_size=2, shuffle=True)

    def merged(world_size: int, accumulate: int, state: dict[str, Any] | None) -> list[dict[int, Any]]:
        """Per window: the samples of all ranks with their noise."""
        found: list[dict[int, Any]] = []
        for rank in range(world_size):
            data = train(make(), rank, world_size, accumulate)
            if state is not None:
                data.load_state_dict(state)
            for number, window in enumerate(data.epoch(1)):
                found.extend([{}] * 0 if number < len(found) else [{}])
                for micro in window.batches:
                    if micro.samples:
                        found[number] |= {int(row[0]): row[1:] for row in zip(*map(plain, micro.batch), strict=True)}
        return found

    whole = merged(*before, None)
    one = train(make(), 0, *before)
    next(one.epoch(1))
    assert merged(*after, one.state_dict()) == whole[1:]
    two = train(make(), 0, *after)
    two.load_state_dict(one.state_dict())
    assert two.batches_per_update == before[0] * before[1]


def test_resume_with_another_batch_size_keeps_the_samples_of_an_update():
    one = train(DataLoader(Numbers(16), batch_size=4))
    next(one.epoch(0))
    two = train(DataLoader(Numbers(16), batch_size=2), world_size=2)
    two.load_state_dict(one.state_dict())
    assert two.global_batch_size == 4
    assert batches(two) == [[[4, 5]], [[8, 9]], [[12, 13]]]
    with pytest.raises(DataError, match="hold 4 samples, which batches of 3 cannot make"):
        train(DataLoader(Numbers(16), batch_size=3)).load_state_dict(one.state_dict())


def test_a_finished_epoch_is_finished_and_the_next_may_be_asked_for():
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(4), shuffle=True, generator=torch.Generator().manual_seed(1))

    whole = train(make())
    expected = [flat(whole, epoch) for epoch in range(2)]
    one = train(make())
    iterator = one.epoch(0)
    assert [next(iterator).last for _ in range(4)] == [False, False, False, True]
    state = one.state_dict()
    assert state["finished"]
    same, following, wrong = train(make()), train(make()), train(make())
    same.load_state_dict(state)
    assert [flat(same, epoch) for epoch in range(2)] == [[], expected[1]]
    following.load_state_dict(state)
    assert flat(following, 1) == expected[1]
    wrong.load_state_dict(state)
    with pytest.raises(DataError, match="stands in epoch 0, but epoch 5 was asked for"):
        list(wrong.epoch(5))


def test_state_between_epochs_names_the_next():
    data = train(DataLoader(Numbers(4)))
    list(data.epoch(0))
    assert (data.state_dict()["epoch"], data.state_dict()["position"]) == (1, 0)


# --------------------------------------------------------------------------------------------------- global batch size


def test_accumulation_follows_from_the_global_batch_size():
    assert derive_accumulation(64, 8, 2) == 4
    with pytest.raises(ConfigurationError, match=r"not a multiple of batch_size 8 x 2 processes = 16.*16 or 32"):
        derive_accumulation(24, 8, 2)
    with pytest.raises(
        ConfigurationError, match=r"Possible: multiples of 16, such as 16, or a loader with batch_size 1 or 2 or 4"
    ):
        derive_accumulation(8, 8, 2)
    with pytest.raises(ConfigurationError, match="needs a loader with a known batch_size"):
        derive_accumulation(8, None, 2)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigurationError, match="uneven='skip' is not known"):
        train(DataLoader(Numbers(4)), uneven="skip")


def test_windows_are_windows():
    assert isinstance(next(train(DataLoader(Numbers(4))).epoch(0)), Window)


class OfMyOwn(DataLoader):
    """A subclass, for which nothing may be special."""


@pytest.mark.parametrize("kind", [DataLoader, OfMyOwn])
def test_persistent_workers_end_with_the_fit(kind):
    import multiprocessing

    import scalar

    class Validates(scalar.Scalar):
        def validation_step(self, batch, batch_idx):
            return None

    loaders = [kind(scalar.Numbers(4), 2, num_workers=1, persistent_workers=True) for _ in range(2)]
    scalar.trainer(max_epochs=2).fit(Validates(), *loaders)
    assert multiprocessing.active_children() == []
