"""The order of an epoch: the user's sampler as it is, drawn from a stream that follows from seed and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ..seeding import derive, seed_all
from .blocks import Blocks
from .positions import ORDER
from .remembered import Remembered
from .sharding import KnowsEpoch, index_source, samplers

_AT_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)
PASS = 2**32  # more than the batches of a pass


class Order:
    """The index stream of a loader, epoch by epoch.

    torch's own samplers draw all they need from the global generators when the first index is taken; those of other
    classes may draw at any time, and so are seeded before each of their batches. Generators that the user gave are
    not seeded: they go on from epoch to epoch exactly as in plain PyTorch, where a loader draws the base seed of its
    workers from its generator between ``iter(batch_sampler)`` and the first batch.
    """

    def __init__(self, loader: DataLoader[Any], seed: int, *, iterable: bool = False, repeats: bool = False) -> None:
        self._source, self._seed = index_source(loader), seed
        self._draws_late = not iterable and not _draws_at_once(self._source)
        self._told = [x for x in (*samplers(loader).values(), loader.dataset) if isinstance(x, KnowsEpoch)]
        self._remembered = Remembered(loader)
        self._epoch = self._pass = 0
        self._repeats = repeats  # whether it begins anew, with other random numbers, where it ends
        self._rewind: dict[str, Any] = {}
        self._kept: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next ``iter`` is of, to the samplers and the data set too where they can be told.

        Without a call it is epoch 0 and nobody is told.
        """
        self._epoch, self._rewind = 0 if self._kept is not None else epoch, {}
        self.load(self._kept or {}, workers_kept=False)
        for told in self._told:
            told.set_epoch(self._epoch)

    def keep(self) -> None:
        """Give the order of the first epoch in all of them."""
        self._kept = self.state()

    def state(self) -> dict[str, Any]:
        """What the user's samplers remember, see `Remembered`, as plain data."""
        return self._remembered.state()

    @property
    def inexact(self) -> str | None:
        """What samplers hold that is not stored."""
        return self._remembered.unknown

    def load(self, state: dict[str, Any], *, workers_kept: bool) -> None:
        """Put the user's samplers back to what they were when this epoch began.

        ``workers_kept``: persistent workers lived on then, so the loader did not draw a base seed; it will now, with
        new workers, and that draw has to be undone.
        """
        self._remembered.load(state)
        if workers_kept:
            self._rewind = state

    def __iter__(self) -> Iterator[Any]:
        # Not a generator function: a batch sampler's own __iter__ may draw, and has to do so when torch calls it.
        whole = self._begun(self._batches)
        return self._again(whole) if self._repeats else whole

    def blocks(self) -> tuple[Blocks, Iterator[Sequence[Any]]] | None:
        """The same indices, of which batches have yet to be made; None where only the sampler can make them."""
        found = None if self._repeats else self._blocks()
        return None if found is None else (found, self._begun(found.__iter__))

    def _blocks(self) -> Blocks | None:
        source = self._source
        if type(source) is not BatchSampler or type(source.sampler) not in _AT_ONCE:
            return None
        return Blocks(source.sampler, source.batch_size, source.drop_last)

    def _batches(self) -> Iterator[Any]:
        found = self._blocks()
        if found is None or type(found.sampler) is SequentialSampler:  # a part of a range is no faster than its items
            return iter(self._source)
        return found.batches()

    def _begun(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._rewind:
            self.load(self._rewind, workers_kept=True)
        self._pass = 0
        seed_all(self._derived(0))
        return self._drawn(make, undone=bool(self._rewind))

    def _drawn(self, make: Callable[[], Iterator[Any]], *, undone: bool) -> Iterator[Any]:
        iterator = make()
        drawn = self._draw(iterator, self._remembered.generator_states() if undone else {})
        return drawn if self._draws_late else chain(drawn, iterator)

    def _derived(self, number: int) -> int:
        return derive(self._seed, ORDER, self._epoch, number + self._pass * PASS)

    def _again(self, iterator: Iterator[Any]) -> Iterator[Any]:
        given = True
        while given:
            given = False
            for batch in iterator:
                given = True
                yield batch
            self._pass += 1
            seed_all(self._derived(0))
            iterator = self._drawn(self._batches, undone=False)

    def _draw(self, iterator: Iterator[Any], undo: dict[str, Any]) -> Iterator[Any]:
        """The first index, or all of them where each may draw random numbers."""
        self._remembered.load(undo, generators_only=True)
        try:
            for number in count(1):
                seed_all(self._derived(number))
                yield next(iterator)
                if not self._draws_late:
                    break
        except StopIteration:
            return


def _draws_at_once(sampler: Any) -> bool:
    if type(sampler) is BatchSampler:
        return _draws_at_once(sampler.sampler)
    return type(sampler) in _AT_ONCE
