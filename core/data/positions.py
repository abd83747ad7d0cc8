"""Seeds by position: the indices of a batch carry where they stand, and reading them seeds the generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from ..seeding import derive, mark, of_host, of_torch, seed_all, seed_torch

SAMPLE, ORDER, EVAL = 1, 2, 3  # which stream of random numbers; the first number after the run's seed
PROBES = 64
_COLLATES = (default_collate, default_convert)


class Indices(list[Any]):
    """The indices of one batch. Iterating over them seeds all generators for each sample before it is read.

    torch documents that a loader reads ``[dataset[i] for i in indices]`` and, of an iterable data set,
    ``[next(iterator) for _ in indices]``, in the worker where there is one. So the user's data set needs no wrapper.
    """

    __slots__ = ("epoch", "seed", "start")

    def __init__(self, indices: Iterable[Any], seed: int, epoch: int, start: int) -> None:
        super().__init__(indices)
        self.seed, self.epoch, self.start = seed, epoch, start

    def __iter__(self) -> Iterator[Any]:
        seed, epoch = self.seed, self.epoch
        for position, index in enumerate(super().__iter__(), self.start):
            seed_all(derive(seed, SAMPLE, epoch, position))
            yield index

    def __reduce__(self) -> tuple[type[Indices], tuple[list[Any], int, int, int]]:
        return (Indices, (self[:], self.seed, self.epoch, self.start))


class Placed(tuple[Any, int, int, int]):
    """The index of a batch that a data set builds itself (``batch_size=None``), its position, the run's seed, and the
    epoch: from the last three follows what to seed with before it is read."""

    __slots__ = ()


@runtime_checkable
class ReadsBatches(Protocol):
    """A data set that reads a whole batch in one call."""

    def __getitems__(self, indices: list[Any], /) -> list[Any]: ...


def _unread(index: Any) -> Any:
    raise NotImplementedError(f"the data set reads batches only, and one sample was asked for: {index!r}.")


class Reads:
    """The reads of a data set, the generators seeded before each.

    Seeding takes many times as long as to see that a read left the generators alone. So after `PROBES` reads only those
    are seeded that moved: none, torch's, or all. A read that moves another one is done again with the seeds that it
    should have had, and all reads after it get them too. What is read is the same in either case.
    """

    __slots__ = ("_moved_torch", "get", "many", "probes", "seed")

    def __init__(self, dataset: Any, *, quiet: bool) -> None:
        self.get: Callable[[Any], Any] = getattr(dataset, "__getitem__", _unread)
        self.many = dataset.__getitems__ if isinstance(dataset, ReadsBatches) else None
        self.seed: Callable[[int], object] | None = seed_all
        self.probes = PROBES if quiet else 0
        self._moved_torch = False

    @property
    def quiet(self) -> bool:
        """Whether not all generators are seeded, or perhaps not for long."""
        return self.probes > 0 or self.seed is not seed_all

    def batch(self, indices: Indices) -> Any:
        """The samples of a batch."""
        seed, epoch, start = indices.seed, indices.epoch, indices.start
        if self.many is not None:
            return self.one(self.many, indices[:], start, seed, epoch)
        get = self.get
        if self.seed is None:
            before = mark()
            samples = [get(index) for index in list.__iter__(indices)]
            if mark() == before:
                return samples
            self._notice(before)
        numbered = enumerate(list.__iter__(indices), start)
        return [self.one(get, index, position, seed, epoch) for position, index in numbered]

    def one(self, get: Callable[[Any], Any], index: Any, position: int, seed: int, epoch: int) -> Any:
        """One read: of a sample, or of a whole batch."""
        if self.seed is None:
            before = mark()
            result = get(index)
            if mark() == before:
                return result
            self._notice(before)
        return self._seeded(get, index, derive(seed, SAMPLE, epoch, position))

    def _notice(self, before: bytes) -> None:
        """A read moved a generator that was not seeded."""
        self.seed = seed_all if mark()[of_host] != before[of_host] else seed_torch

    def _seeded(self, get: Callable[[Any], Any], index: Any, value: int) -> Any:
        assert self.seed is not None
        self.seed(value)
        if self.seed is seed_all and not self.probes:
            return get(index)
        before = mark()
        result = get(index)
        now = mark()
        self._moved_torch |= now[of_torch] != before[of_torch]
        if now[of_host] != before[of_host]:
            if not self.probes:  # seeded was torch's generator alone
                seed_all(value)
                result = get(index)
            self.seed, self.probes = seed_all, 0
        elif self.probes:
            self.probes -= 1
            if not self.probes:
                self.seed = seed_torch if self._moved_torch else None
        return result


class Reader:
    """Stands before the user's data set, and seeds before what is read at a position, see `Reads`.

    Everything else, also setting an attribute, goes to the user's data set.
    """

    __slots__ = ("_get", "_one", "_reads", "_wrapped")

    def __init__(self, dataset: Any, *, quiet: bool) -> None:
        reads = Reads(dataset, quiet=quiet)
        for name, value in (("_wrapped", dataset), ("_reads", reads), ("_get", reads.get), ("_one", reads.one)):
            object.__setattr__(self, name, value)

    def __getitems__(self, indices: Indices) -> Any:
        return self._reads.batch(indices)

    def __getitem__(self, index: Any) -> Any:
        return self._one(self._get, *index) if type(index) is Placed else self._wrapped[index]

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_wrapped"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The user's, for isinstance."""
        return type(self._wrapped)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (partial(Reader, quiet=self._reads.quiet), (self._wrapped,))


def seeded_dataset(loader: DataLoader[Any]) -> Any:
    """The data set to read `Indices` from: the user's own where it iterates over them."""
    dataset = loader.dataset
    if loader.batch_sampler is not None and type(dataset) in (Subset, StackDataset):
        return dataset
    # Others that draw after a read, a collate function or the loader itself, would find generators without a seed.
    quiet = loader.collate_fn in _COLLATES and type(loader).__iter__ is DataLoader.__iter__
    if loader.batch_sampler is not None and not quiet and not isinstance(dataset, ReadsBatches):
        return dataset
    return Reader(dataset, quiet=quiet)


def draws_nothing(loader: DataLoader[Any]) -> bool:
    """Whether reading this loader certainly draws no random number, so that no seeding is needed."""
    return loader.collate_fn in _COLLATES and _is_stored(loader.dataset)


def _is_stored(dataset: Any) -> bool:
    # Exact types: a subclass may draw.
    kind = type(dataset)
    if kind is Subset:
        return _is_stored(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(_is_stored, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(_is_stored, parts.values() if isinstance(parts, dict) else parts))
    return kind in (TensorDataset, Tensor, list, tuple, range)
