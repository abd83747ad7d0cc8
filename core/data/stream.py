"""Training data that is not read by index: iterable data sets, loaders that own their position, any iterable."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ..errors import CheckpointError, DataError
from ..plugins import MicroBatch
from ..seeding import derive, seed_all
from .loader_copy import copy_loader
from .order import Order
from .positions import ORDER, SAMPLE, Indices
from .sharding import OwnsPosition, describe, known_length, limited, local_part
from .window import Ahead, Weigh, Window, behind, beyond, reweigh_, sum_over_ranks

_END: Any = object()


class _Counted:
    """A collate function that also says how many samples it was given."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> tuple[int, Any]:
        return len(samples), self.collate(samples)


class _Seeded:
    """The copy's batch sampler: the user's, with the position of each batch, so that reading it seeds."""

    def __init__(self, order: Order, rank: int, world_size: int, seed: int) -> None:
        self.order, self.rank, self.world_size, self.seed, self.epoch = order, rank, world_size, seed, 0

    def __iter__(self) -> Iterator[Any]:
        return self._batches(iter(self.order))

    def _batches(self, stream: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(stream):
            start = turn(number, self.rank, self.world_size) * len(batch)
            yield Indices(batch, self.seed, self.epoch, start)


def turn(number: int, rank: int, world_size: int) -> int:
    """The global position of a rank's batch ``number``, if ranks took turns.

    The first is the same for all ranks: a data set that shuffles when it is first read must do so alike on all of them.
    """
    return number * world_size + rank if number else 0


class LocalBatches:
    """The batches that this rank reads of a loader that is not dealt by index, with their samples, epoch by epoch.

    Samples are known of a torch DataLoader that builds the batches itself; any other batch counts as 1.
    """

    def __init__(self, loader: Any, *, rank: int, world_size: int, seed: int) -> None:
        part = local_part(loader, rank, world_size)
        self.part, self._rank, self._world_size, self._seed = part, rank, world_size, seed
        self.owner = part if isinstance(part, OwnsPosition) else None
        self._order: Order | None = None
        self._deal: _Seeded | None = None
        self._counted = False
        self.left = False  # whether an iterator was begun that has not come to its end
        if isinstance(part, DataLoader) and self.owner is None:
            self._order = Order(part, seed, iterable=isinstance(part.dataset, IterableDataset))
            if part.batch_sampler is not None:
                self._deal = _Seeded(self._order, rank, world_size, seed)
                self._counted = type(part).__iter__ is DataLoader.__iter__
                replaced: dict[str, Any] = {"batch_sampler": self._deal}
                if self._counted:
                    replaced["collate_fn"] = _Counted(part.collate_fn)
                self.part = copy_loader(part, **replaced)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, float]]:
        """The batches of an epoch from number ``start`` on, which is 0 where the loader cannot go there."""
        if self._deal is not None:
            self._deal.epoch = epoch
        seed_all(derive(self._seed, ORDER, epoch, 0))
        iterator = iter(self.part)
        self.left = True
        if iterator is self.part and epoch > 0:
            iterator = self._reopened(iterator, epoch)
        if self.owner is None:
            iterator = islice(iterator, start, None)
        for number in count(start):
            if self._deal is None:
                seed_all(derive(self._seed, SAMPLE, epoch, turn(number, self._rank, self._world_size)))
            batch = next(iterator, _END)
            if batch is _END:
                self.left = False
                return
            if self._counted:
                samples, batch = batch
                yield batch, float(samples)
            else:
                yield batch, 1.0

    def close(self) -> None:
        """End the workers of a loader that is a copy of the user's."""
        if self._deal is not None:
            self.part = copy_loader(self.part)

    def keep_order(self) -> None:
        if self._order is not None:
            self._order.keep()

    def set_epoch(self, epoch: int) -> None:
        """See `Order.set_epoch`."""
        if self._order is not None:
            self._order.set_epoch(epoch)

    def own_state(self) -> dict[str, Any] | None:
        """Of a loader that owns its position: what it says, and whether it stands within an epoch."""
        return None if self.owner is None else {"state": self.owner.state_dict(), "left": self.left}

    def load_own_state(self, state: dict[str, Any], *, within: bool) -> None:
        """Put a loader back that owns its position; not ``within`` an epoch, the next one begins from its beginning."""
        assert self.owner is not None
        self.owner.load_state_dict(state["state"])
        if state["left"] and not within:
            iter(self.part)  # goes on with the epoch that was left before its end, so that the next one begins anew

    def generators(self) -> dict[str, Any]:
        """The states of the user's generators, see `Order.state`."""
        return {} if self._order is None else self._order.state()

    def load_generators(self, state: dict[str, Any]) -> None:
        if self._order is not None:
            self._order.load(state, workers_kept=False)

    def _reopened(self, iterator: Iterator[Any], epoch: int) -> Iterator[Any]:
        first = next(iterator, _END)
        if first is _END:
            raise DataError(
                f"the data is a {type(self.part).__name__}, an iterator that can be read only once, and it was at its "
                f"end when epoch {epoch} began. Pass an object whose __iter__ begins anew: a list, a DataLoader."
            )
        yield first
        yield from iterator


class Stream:
    """The windows of a loader that each rank reads for itself."""

    reads = "that each rank reads for itself"

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        world_size: int,
        accumulate: int,
        seed: int,
        uneven: str,
        limit: int | float | None,
        weigh: Weigh | None,
    ) -> None:
        self._text = describe(loader)
        self._batches = LocalBatches(loader, rank=rank, world_size=world_size, seed=seed)
        self._rank, self._world_size, self._accumulate = rank, world_size, accumulate
        self._uneven, self._limit, self._weigh = uneven, limit, weigh
        self.batch_size = loader.batch_size if isinstance(loader, DataLoader) else None
        self._epoch = self._position = 0
        self._running = self._finished = False
        self._generators: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        if limit != 0 and self.num_batches == 0:
            raise DataError(f"the loader gives no batch: {self._text}.")

    @property
    def batches_per_update(self) -> int:
        return self._world_size * self._accumulate

    @property
    def num_batches(self) -> int | None:
        length = known_length(self._batches.part)
        limit = limited(self._limit, length, 1, self._text)
        return length if limit is None else limit if length is None else min(length, limit)

    def keep_order(self) -> None:
        self._batches.keep_order()

    def set_accumulation(self, accumulate: int) -> None:
        self._accumulate = accumulate

    @property
    def num_updates(self) -> int | None:
        return None if (total := self.num_batches) is None else -(-total // self._accumulate)

    def epoch(self, epoch: int, ahead: Ahead | None = None) -> Iterator[Window]:
        """The windows of one epoch, from the position that was loaded where the loader can go there. ``ahead`` has no
        part: how many batches a window has is agreed on by all ranks, in its turn."""
        if behind(self._resumed, epoch):
            return
        lost, resumed, self._resumed = self.inexact, self._resumed, None
        self._batches.set_epoch(epoch)
        start = 0 if resumed is None else self._resume(resumed, epoch, lost)
        self._epoch, self._position, self._running = epoch, start, True
        self._generators = self._batches.generators()
        if resumed is not None and resumed["finished"] and resumed["epoch"] == epoch:
            self.end_epoch()  # its last window had been handed out
            return
        length = known_length(self._batches.part)
        limit = limited(self._limit, length, 1, self._text)
        if length is not None and isinstance(self._batches.part, Sequence) and self._world_size == 1:
            # What other data say of their length is an estimate, and what one rank's say is of that rank alone.
            limit = length if limit is None else min(limit, length)
        source = islice(self._batches.epoch(epoch, start), None if limit is None else max(0, limit - start))
        spare: Any = None
        while True:
            taken = list(islice(source, self._accumulate))
            spare = taken[-1][0] if taken else spare
            window = self._window(taken, spare, first=self._position == start)
            if window is None:
                break
            self._position += len(window.batches)
            ended = len(window.batches) < self._accumulate  # on all ranks
            window.last = self._finished = ended or (limit is not None and self._position >= limit)
            yield window
            if window.last:
                break
        if self._position == 0 and self._limit != 0:
            raise DataError(f"the loader gives no batch in epoch {epoch}: {self._text}.")
        self.end_epoch()

    def _window(self, taken: list[tuple[Any, float]], spare: Any, *, first: bool) -> Window | None:
        shares = [self._share(batch, samples) for batch, samples in taken]
        turns = len(taken)
        samples, total = sum(samples for _, samples in taken), sum(shares)
        if self._world_size > 1:
            counts = [0.0] * self._world_size
            counts[self._rank] = float(turns)
            # One collective per window; every rank takes part, also one whose data has ended.
            *counts, samples, total = sum_over_ranks([*counts, samples, total])
            turns = self._turns([int(n) for n in counts], first=first)
            if self._uneven == "drop" and turns < max(counts):
                # Every rank saw the same counts, so every rank comes here.
                kept = [sum(samples for _, samples in taken[:turns]), sum(shares[:turns])]
                samples, total = sum_over_ranks(kept)
        if not turns:
            return None
        batches = []
        for number in range(turns):
            batch, share = (taken[number][0], shares[number]) if number < len(taken) else (spare, 0.0)
            batches.append(MicroBatch(batch, self._position + number, None, number == turns - 1, share))
        window = Window(batches, samples, total)
        reweigh_(window, total, self._world_size)
        return window

    def _share(self, batch: Any, samples: float) -> float:
        value = None if self._weigh is None else self._weigh(batch)
        return samples if value is None else float(value)

    def _turns(self, counts: list[int], *, first: bool) -> int:
        """How many micro-batches every rank runs, where rank ``r`` has ``counts[r]`` batches left for this window."""
        if min(counts) == max(counts):
            return counts[0]
        totals = ", ".join(f"rank {rank}: {self._position + n}" for rank, n in enumerate(counts))
        if first and not min(counts):
            raise DataError(
                f"rank {counts.index(0)} has no batch at all in epoch {self._epoch} ({totals}): {self._text}. Give "
                "every rank some data, or use fewer processes."
            )
        if self._uneven == "error":
            raise DataError(
                f"the ranks' data ends at different places in epoch {self._epoch} (batches so far: {totals}). Make the "
                "parts equal, or choose uneven='drop' (stop with the first that ends) or uneven='join' (ranks whose "
                "data has ended take part with weight 0)."
            )
        return min(counts) if self._uneven == "drop" else max(counts)

    def close(self) -> None:
        """See `TrainData.close`."""
        self._batches.close()

    def end_epoch(self) -> None:
        """The next epoch comes next, from its beginning."""
        self._epoch, self._position, self._running, self._finished = self._epoch + 1, 0, False, False

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands after the last window that was handed out, as plain data, the same on all ranks.

        All ranks call it: where the loader owns its position, the ranks' states are gathered.
        """
        if self._resumed is not None:  # nothing was read since
            return {**self._resumed, "batches_per_update": self.batches_per_update}
        states = None
        if (own := self._batches.own_state()) is not None:
            states = [own] * self._world_size
            if self._world_size > 1:
                dist.all_gather_object(states, own)
        return {
            "epoch": self._epoch,
            "position": self._position,
            "finished": self._finished,
            "batches_per_update": self.batches_per_update,
            "world_size": self._world_size,
            "generators": self._generators if self._running else self._batches.generators(),
            "loader": states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the next call of `epoch` has to be for that epoch, or for the next if it was finished."""
        if state["loader"] is not None and self._batches.owner is not None and state["world_size"] != self._world_size:
            raise DataError(
                f"{self._text} owns its position, which the checkpoint holds for {state['world_size']} processes; this "
                f"run has {self._world_size}. Resume with {state['world_size']} processes, or use a torch DataLoader "
                "over a data set that is read by index: its position holds for any number."
            )
        known = isinstance(self._batches.part, Sequence) and state["world_size"] == self._world_size
        length = known_length(self._batches.part) if known else None
        if length is not None and state["position"] > length:
            raise CheckpointError(beyond(state["position"], length, "batches"))
        self._accumulate, rest = divmod(state["batches_per_update"], self._world_size)
        if rest:
            raise DataError(
                f"the checkpoint's updates hold {state['batches_per_update']} batches, which {self._world_size} "
                "processes cannot share evenly when each reads its own part. Resume with a number of processes that "
                "divides it."
            )
        self._epoch, self._position, self._running, self._resumed = state["epoch"], state["position"], False, state

    @property
    def inexact(self) -> str | None:
        """Why the position that was loaded cannot be gone to, where it cannot."""
        state = self._resumed
        if state is None or not state["position"] or state["finished"]:
            return None
        if self._batches.owner is not None and state["loader"] is not None:
            return None
        if isinstance(self._batches.part, Sequence) and state["world_size"] == self._world_size:
            return None
        return (
            f"{self._text} cannot go to batch {state['position']}, where the checkpoint was written, without reading "
            f"the data before it: epoch {state['epoch']} begins anew. To resume exactly, use a loader with state_dict "
            "and load_state_dict, such as torchdata's StatefulDataLoader, or save at the end of an epoch"
        )

    def _resume(self, state: dict[str, Any], epoch: int, lost: str | None) -> int:
        """Go to where the state says; return the number of the first batch."""
        follows = state["finished"] and state["epoch"] == epoch - 1
        if state["epoch"] != epoch and not follows:
            raise DataError(f"the training data stands in epoch {state['epoch']}, but epoch {epoch} was asked for.")
        position = 0 if follows else int(state["position"])
        if not follows:
            self._batches.load_generators(state["generators"])
        if self._batches.owner is not None and state["loader"] is not None:
            within = position > 0 and not state["finished"]
            self._batches.load_own_state(state["loader"][self._rank], within=within)
        elif lost is not None:
            warnings.warn(f"{lost}.", stacklevel=2)
            return 0
        return position
