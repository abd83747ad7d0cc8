"""Evaluation data: every sample once over all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from ..errors import DataError
from ..seeding import derive
from .dealing import prebuilt_size
from .indexed import dealt_loader
from .loader_copy import copy_loader
from .order import Order
from .positions import EVAL, Indices, Placed, draws_nothing
from .sharding import describe, index_source, is_indexed, known_length, limited, refuse_distributed_samplers
from .stream import LocalBatches


class _Turns:
    """The copy's batch sampler: every ``world_size``-th batch of the user's, whole."""

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, seed: int, repeats: bool) -> None:
        self.order = Order(loader, seed, repeats=repeats)
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.prebuilt, self.seeded = loader.batch_sampler is None, not draws_nothing(loader)
        self.limit: int | None = None
        self.sizes: deque[tuple[int, int, list[Any]]] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.sizes.clear()
        return self._batches(iter(self.order))

    def _batches(self, stream: Iterator[Any]) -> Iterator[Any]:
        position = 0
        for number, batch in enumerate(islice(stream, self.limit)):
            indices = [batch] if self.prebuilt else list(batch)
            if number % self.world_size == self.rank:
                self.sizes.append((number, prebuilt_size(batch) if self.prebuilt else len(indices), indices))
                if not self.seeded:
                    yield batch
                elif self.prebuilt:
                    yield Placed((batch, position, self.seed, 0))
                else:
                    yield Indices(indices, self.seed, 0, position)
            position += len(indices)


class EvalData:
    """One rank's side of data that is evaluated: batch ``j`` of the user's loader goes to rank ``j % world_size``.

    Iterating gives ``(batch, batch_idx, samples)`` with the batch's number among all ranks' batches, so that the data
    set's order can be restored. Ranks may have different numbers of batches, also none. ``limit`` is a number of
    batches per rank (int) or a fraction of all (float). Each iteration sees the same order and the same random numbers,
    but for generators that the user gave to a sampler; no ``set_epoch`` is called. ``indices`` are those of the samples
    in the newest batch, as the user's sampler gave them; None where the loader is not read by index.
    Loaders that are not read by index are read by each rank for itself (`sharding.local_part`).
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        world_size: int,
        seed: int,
        limit: int | float | None = None,
        total: int | None = None,
        repeats: bool = False,
    ) -> None:
        """``total`` is a number of all ranks' batches instead of ``limit``, which may go over the end if it repeats."""
        seed = derive(seed, EVAL)
        self._rank, self._world_size, self._text = rank, world_size, describe(loader)
        self._turns: _Turns | None = None
        self.indices: Any = None
        self._limit = limit
        if is_indexed(loader):
            refuse_distributed_samplers(loader, world_size)
            self._turns = _Turns(loader, rank, world_size, seed, repeats)
            self._loader: Any = dealt_loader(loader, self._turns, seeded=self._turns.seeded)
            self._measured: Any = index_source(loader)
            allowed = limited(limit, known_length(self._measured), world_size, self._text)
            self._turns.limit = total if total is not None else allowed
        else:
            self._local = LocalBatches(loader, rank=rank, world_size=world_size, seed=seed)
            self._measured = self._local.part

    def __iter__(self) -> Iterator[tuple[Any, int, float]]:
        if self._turns is None:
            limit = limited(self._limit, known_length(self._measured), 1, self._text)
            for number, (batch, samples) in enumerate(islice(self._local.epoch(0), limit)):
                yield batch, number * self._world_size + self._rank, samples
            return
        sizes = self._turns.sizes
        for batch in self._loader:
            if not sizes:
                raise DataError(f"{self._text} gave more batches than its batch sampler named.")
            number, samples, self.indices = sizes.popleft()
            yield batch, number, float(samples)
        if sizes:
            raise DataError(f"{self._text} gave fewer batches than its batch sampler named.")

    def close(self) -> None:
        """End the loader's workers, where they live on from pass to pass."""
        if self._turns is None:
            self._local.close()
        else:
            self._loader = copy_loader(self._loader)

    def length(self) -> int | None:
        """This rank's batches, None where the loader has no length."""
        try:
            return len(self)
        except TypeError:
            return None

    def __len__(self) -> int:
        """This rank's batches. Raises TypeError where the loader has no length."""
        length = len(self._measured)
        if self._turns is None:
            limit = limited(self._limit, length, 1, self._text)
            return length if limit is None else min(length, limit)
        total = length if self._turns.limit is None else min(length, self._turns.limit)
        return max(0, -(-(total - self._rank) // self._world_size))
