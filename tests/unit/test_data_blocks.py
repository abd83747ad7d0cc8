"""Indices that are cut out of what a sampler goes over: the same as torch's batch sampler and walking give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler
from trivet.data.blocks import Blocks
from trivet.data.dealing import deal, windows
from trivet.data.positions import ORDER
from trivet.data.train import TrainData
from trivet.seeding import derive, seed_all

SEED = 7
LENGTH = 23
DATA = range(LENGTH)


class Own(Sampler[int]):
    """Of whose iterator nothing is known."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(torch.randint(LENGTH, (), generator=self.generator))

    def __len__(self) -> int:
        return LENGTH


SAMPLERS: dict[str, Callable[[torch.Generator], Any]] = {
    "sequential": lambda _: SequentialSampler(DATA),
    "random": lambda _: RandomSampler(DATA),
    "random, generator": lambda generator: RandomSampler(DATA, generator=generator),
    "random, more than once": lambda generator: RandomSampler(DATA, num_samples=60, generator=generator),
    "random, a part": lambda generator: RandomSampler(DATA, num_samples=9, generator=generator),
    "replacement": lambda generator: RandomSampler(DATA, replacement=True, num_samples=75, generator=generator),
    "subset": lambda generator: SubsetRandomSampler(range(3, 20), generator=generator),
    "weighted": lambda generator: WeightedRandomSampler(range(LENGTH), 30, generator=generator),
    "weighted, global": lambda _: WeightedRandomSampler(range(LENGTH), 30),
    "distributed": lambda _: DistributedSampler(DATA, num_replicas=1, rank=0),
    "list": lambda _: [*range(5, 20), 1, 1],
    "range": lambda _: range(3, 21, 2),
    "own": Own,
}


# size of a batch, drop_last, (rank, ranks, accumulation), position to begin at, limit
CELLS: list[tuple[int, bool, tuple[int, int, int], int, int | None]] = [
    (2, False, (0, 1, 1), 0, None),
    (2, False, (0, 1, 3), 0, None),
    (2, True, (1, 2, 1), 0, None),
    (2, False, (1, 2, 2), 4, None),
    (3, False, (2, 3, 1), 0, None),
    (3, True, (0, 2, 1), 3, None),
    (3, False, (0, 2, 2), 5, None),
    (3, True, (1, 2, 1), 5, None),
    (3, True, (0, 1, 1), 5, None),
    (5, False, (1, 4, 1), 0, None),
    (1, False, (3, 4, 2), 0, None),
    (40, False, (1, 2, 1), 0, None),
    (2, False, (0, 2, 1), 0, 1),
    (2, True, (1, 2, 1), 2, 2),
    (4, False, (1, 2, 1), 0, 5),
]


def seeded(stream: Iterator[Any], every: bool) -> Iterator[Any]:
    for number in count(1):
        if every or number == 1:
            seed_all(derive(SEED, ORDER, 0, number))
        try:
            yield next(stream)
        except StopIteration:
            return


def rest(stream: Iterator[list[int]], position: int) -> Iterator[list[int]]:
    while position:
        batch = next(stream)
        if len(batch) > position:
            return chain([batch[position:]], stream)
        position -= len(batch)
    return stream


def states(generator: torch.Generator) -> tuple[list[int], list[int]]:
    return generator.get_state().tolist(), torch.get_rng_state().tolist()


def walked(name: str, size: int, drop_last: bool, rank: int, ranks: int, per_update: int, skip: int, limit: Any) -> Any:
    """By torch's BatchSampler, one window ahead, and `deal`: what a rank reads, and where the generators stand."""
    generator = torch.Generator().manual_seed(3)
    batches = BatchSampler(SAMPLERS[name](generator), size, drop_last)
    stream, position = islice(seeded(iter(batches), every=name == "own"), limit), skip
    for window, last in windows(rest(stream, skip), per_update):
        pieces, total = deal(window, rank, ranks)
        position += int(total)
        yield [(p.indices, p.samples, p.weight) for p in pieces], position, last, states(generator)


def cut(name: str, size: int, drop_last: bool, rank: int, ranks: int, per_update: int, skip: int, limit: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    batches = BatchSampler(SAMPLERS[name](generator), size, drop_last)
    loader = DataLoader(DATA, batch_sampler=batches, collate_fn=default_convert)  # type: ignore[arg-type]
    data = TrainData(loader, rank=rank, world_size=ranks, accumulate=per_update // ranks, seed=SEED, limit=limit)
    if skip:
        data.load_state_dict({**data.state_dict(), "position": skip, "batches_per_update": per_update})
    for window in data.epoch(0):
        read = [(micro.batch, micro.samples, micro.weight) for micro in window.batches]
        yield read, data.state_dict()["position"], window.last, states(generator)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_is_read_as_by_walking_over_all_batches(name: str):
    """Indices, samples, weights, positions, and after each window the states of the generators."""
    for size, drop_last, (rank, ranks, accumulate), skip, limit in CELLS:
        if name == "distributed" and ranks > 1:
            continue
        cell = (name, size, drop_last, rank, ranks, ranks * accumulate, skip)
        expected = list(walked(*cell, None if limit is None else limit * ranks))
        assert expected, cell
        assert list(cut(*cell, limit)) == expected, (*cell, limit)


@pytest.mark.parametrize("name", ["sequential", "range"])
def test_what_other_ranks_read_is_not_walked_over(name: str):
    """Neither within an update nor on the way to where training goes on: either would take days here."""
    many = range(10**14)
    sampler = SequentialSampler(many) if name == "sequential" else many
    loader = DataLoader(many, 2, sampler=sampler, collate_fn=default_convert)  # type: ignore[arg-type]
    data = TrainData(loader, rank=10**12, world_size=2 * 10**12, accumulate=1, seed=SEED)
    data.load_state_dict({**data.state_dict(), "position": 8 * 10**12})
    found = data.epoch(0)
    assert [next(found).batches[0].batch for _ in range(2)] == [[10**13, 10**13 + 1], [14 * 10**12, 14 * 10**12 + 1]]


def test_a_permutation_of_torch_is_one_block():
    """Else each rank would go through the indices of all ranks."""
    whole, end = Blocks(RandomSampler(DATA), 2, False), object()
    blocks = iter(whole)
    permutation = next(blocks)
    assert sorted(permutation) == list(DATA)
    assert next(blocks, end) is end
    assert [len(block) for block in Blocks(RandomSampler(DATA, replacement=True, num_samples=70), 2, False)] == [
        32,
        32,
        6,
    ]
    assert [*Blocks(SequentialSampler(DATA), 2, False)] == [DATA]
