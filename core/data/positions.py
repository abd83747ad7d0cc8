"""Seeds by position: the indices of a batch carry where they stand, and reading them seeds the generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

from ..seeding import derive, seed_all

SAMPLE, ORDER, EVAL = 1, 2, 3  # which stream of random numbers; the first number after the run's seed


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

    def plain(self) -> list[Any]:
        """The indices alone; seeds all generators for the first of them."""
        seed_all(derive(self.seed, SAMPLE, self.epoch, self.start))
        return self[:]

    def __reduce__(self) -> tuple[type[Indices], tuple[list[Any], int, int, int]]:
        return (Indices, (self[:], self.seed, self.epoch, self.start))


@runtime_checkable
class ReadsBatches(Protocol):
    """A data set that reads a whole batch in one call."""

    def __getitems__(self, indices: list[Any], /) -> list[Any]: ...


class BatchReader:
    """Stands before a data set that reads whole batches in one call, and seeds once for each.

    Everything else, also setting an attribute, goes to the user's data set.
    """

    __slots__ = ("_wrapped",)

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_wrapped", dataset)

    def __getitems__(self, indices: Indices) -> Any:
        return self._wrapped.__getitems__(indices.plain())

    def __getitem__(self, index: Any) -> Any:
        return self._wrapped[index.plain()[0] if isinstance(index, Indices) else index]

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_wrapped"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __reduce__(self) -> tuple[type[BatchReader], tuple[Any]]:
        return (BatchReader, (self._wrapped,))


def seeded_dataset(loader: DataLoader[Any]) -> Any:
    """The data set to read `Indices` from: the user's own where it is read sample by sample."""
    dataset = loader.dataset
    # These two iterate over the indices that they are given, so they need no wrapper.
    if loader.batch_sampler is not None and (
        type(dataset) in (Subset, StackDataset) or not isinstance(dataset, ReadsBatches)
    ):
        return dataset
    return BatchReader(dataset)


def draws_nothing(loader: DataLoader[Any]) -> bool:
    """Whether reading this loader certainly draws no random number, so that no seeding is needed."""
    return loader.collate_fn in (default_collate, default_convert) and _is_stored(loader.dataset)


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
