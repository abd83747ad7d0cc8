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

from ..seeding import derive, host_mark, seed_all, seed_torch

SAMPLE, ORDER, EVAL = 1, 2, 3  # which stream of random numbers; the first number after the run's seed
PROBES, ALWAYS_SEED = 64, -1
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


@runtime_checkable
class ReadsBatches(Protocol):
    """A data set that reads a whole batch in one call."""

    def __getitems__(self, indices: list[Any], /) -> list[Any]: ...


class Reader:
    """Stands before the user's data set, and seeds the generators before each sample, or whole batch, is read.

    Seeding Python's and numpy's generators takes several times as long as to see that a read left them alone. So after
    `PROBES` reads that did, they are no longer seeded (``quiet``), until a read moves them: that one is done again with
    the seeds that it should have had, and all reads after it are seeded. What is read is the same in either case.
    Everything else, also setting an attribute, goes to the user's data set.
    """

    __slots__ = ("_probes", "_whole", "_wrapped")

    def __init__(self, dataset: Any, *, quiet: bool) -> None:
        object.__setattr__(self, "_wrapped", dataset)
        object.__setattr__(self, "_whole", isinstance(dataset, ReadsBatches))
        object.__setattr__(self, "_probes", PROBES if quiet else ALWAYS_SEED)

    def __getitems__(self, indices: Indices) -> Any:
        wrapped, seed, epoch, start = self._wrapped, indices.seed, indices.epoch, indices.start
        if self._whole:
            return self._read(wrapped.__getitems__, indices[:], derive(seed, SAMPLE, epoch, start))
        read, get = self._read, wrapped.__getitem__
        return [
            read(get, index, derive(seed, SAMPLE, epoch, n)) for n, index in enumerate(list.__iter__(indices), start)
        ]

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, Indices):
            return self._wrapped[index]
        value = derive(index.seed, SAMPLE, index.epoch, index.start)
        return self._read(self._wrapped.__getitem__, index[0], value)

    def _read(self, get: Callable[[Any], Any], index: Any, value: int) -> Any:
        probes = self._probes
        if not probes:
            seed_torch(value)
            before = host_mark()
            result = get(index)
            if host_mark() == before:
                return result
            object.__setattr__(self, "_probes", ALWAYS_SEED)
        seed_all(value)
        if probes <= 0:
            return get(index)
        before = host_mark()
        result = get(index)
        object.__setattr__(self, "_probes", probes - 1 if host_mark() == before else ALWAYS_SEED)
        return result

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
        return (partial(Reader, quiet=self._probes != ALWAYS_SEED), (self._wrapped,))


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
