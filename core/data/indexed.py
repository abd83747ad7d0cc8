"""Training data that is read by index: a torch DataLoader over a map-style data set, of any class and sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from ..errors import CheckpointError, DataError
from ..plugins import MicroBatch
from .blocks import Blocks, Cut
from .dealing import deal, micro_batches, spans, weight, windows
from .loader_copy import copy_loader
from .order import Order
from .positions import Indices, Placed, draws_nothing, seeded_dataset
from .sharding import describe, index_source, known_length, limited, refuse_distributed_samplers
from .window import Ahead, Weigh, Window, behind, beyond, one_ahead, weigh_


class _Deal:
    """The copy's batch sampler: this rank's micro-batches of every window, in the order of the user's sampler."""

    def __init__(self, loader: DataLoader[Any], order: Order, rank: int, world_size: int, seed: int) -> None:
        self.order, self.rank, self.world_size, self.seed = order, rank, world_size, seed
        self.prebuilt = loader.batch_sampler is None
        self.seeded = not draws_nothing(loader)
        # windows whose batches the loader has not read yet, and where the data stands after each
        self.plans: deque[tuple[Window, int]] = deque()
        self.epoch = self.skip = 0
        self.window_size = 1
        self.whole = False
        self.limit: int | None = None

    def __iter__(self) -> Iterator[Any]:
        # torch calls this twice when it starts workers, and uses the second iterator
        self.plans.clear()
        if self.world_size == self.window_size == 1:
            return self._one_by_one(iter(self.order))
        found = self.order.blocks()
        return self._walked(iter(self.order)) if found is None else self._cut(*found)

    def index_after(self, user_batches: int) -> int:
        """How many micro-batches a rank runs for the first so many batches of the user's in an epoch."""
        whole, rest = divmod(user_batches, self.window_size)
        return whole * micro_batches(self.window_size, self.world_size) + micro_batches(rest, self.world_size)

    def _cut(self, blocks: Blocks, stream: Iterator[Any]) -> Iterator[Any]:
        """This rank's micro-batches where torch makes the batches: those of other ranks are not made."""
        size, limit, window_size = blocks.size, self.limit, self.window_size
        skip = self.skip if limit is None else min(self.skip, limit * size)  # a limit may have been lowered since
        cut = Cut(stream)
        if (position := cut.skip(skip)) < skip:
            raise DataError(beyond(skip, position, "samples"))
        number = position // size  # of the user's batch that comes next, perhaps without its begin
        index = self.index_after(number)
        window: Window | None = None
        placed: list[Any] = []
        while True:
            batches = window_size if limit is None else min(window_size, limit - number)
            wanted = (number + batches) * size - position
            indices, begin, end = cut.next(wanted)
            total = end - begin
            if total < wanted:  # the last ones
                total -= (position + total) % size if blocks.drop_last else 0
                batches = -(-(position + total) // size) - number
            if window is not None:  # which was held back until it was known whether one follows
                window.last = total <= 0
                self.plans.append((window, position))
                yield from placed
            if total <= 0:
                return
            cuts = spans(total, batches, size, position - number * size, self.rank, self.world_size)
            window = self._window(index, total, [stop - start for start, stop in cuts])
            placed = [
                self._placed([*indices[begin + start : begin + max(stop, 1)]], position + start) for start, stop in cuts
            ]
            position, number, index = position + total, number + batches, index + len(cuts)

    def _walked(self, stream: Iterator[Any]) -> Iterator[Any]:
        """This rank's micro-batches of any other batches."""
        (stream, index), position = self._skip(stream), self.skip
        rank, world_size, prebuilt = self.rank, self.world_size, self.prebuilt
        if not prebuilt:
            stream = map(_sized, stream)
        for window, last in windows(stream, self.window_size):
            pieces, total = deal(window, rank, world_size, prebuilt=prebuilt, whole=self.whole)
            planned = self._window(index, total, [piece.samples for piece in pieces])
            planned.last = last
            end = position + (len(window) if prebuilt else int(total))
            self.plans.append((planned, end))
            for piece in pieces:
                yield self._placed(piece.indices, position + piece.offset)
            position, index = end, index + len(pieces)

    def _one_by_one(self, stream: Iterator[Any]) -> Iterator[Any]:
        """What `deal` gives where every batch is an update of this rank alone."""
        (stream, index), position = self._skip(stream), self.skip
        prebuilt, plans, seeded, seed, epoch = self.prebuilt, self.plans, self.seeded, self.seed, self.epoch
        following = next(stream, _END)
        while following is not _END:
            batch, following = following, next(stream, _END)
            if prebuilt:
                samples, end = len(batch) if type(batch) is list else 1, position + 1  # as `prebuilt_size`
                placed = Placed((batch, position, seed, epoch)) if seeded else batch
            else:
                batch = _sized(batch)
                samples = len(batch)
                end = position + samples
                placed = Indices(batch, seed, epoch, position) if seeded else batch
            window = Window([MicroBatch(None, index, None, True, samples)], samples, samples, following is _END)
            plans.append((window, end))
            yield placed
            position, index = end, index + 1

    def _window(self, index: int, total: float, samples: Iterable[float]) -> Window:
        """A window whose batches are not read yet, the first of which has the number ``index``."""
        batches = [
            MicroBatch(None, number, weight(share, total, self.world_size), False, share)
            for number, share in enumerate(samples, index)
        ]
        batches[-1].last = True
        return Window(batches, total, total)

    def _placed(self, indices: Any, position: int) -> Any:
        """Indices of a micro-batch as they are read: with what seeds them, where reading may draw."""
        if not self.seeded:
            return indices
        if self.prebuilt:
            return Placed((indices, position, self.seed, self.epoch))
        return Indices(indices, self.seed, self.epoch, position)

    def _skip(self, stream: Iterator[Any]) -> tuple[Iterator[Any], int]:
        """What is left of the user's batches, and the number of the micro-batch that comes next."""
        # By index: nothing is read. A batch is cut where the batch size has changed since.
        stream, rest, skipped = islice(stream, self.limit), self.skip, 0
        while rest:
            batch = next(stream, None)
            if batch is None:
                if self.limit is None:  # a limit may have been lowered since
                    raise DataError(beyond(self.skip, self.skip - rest, "samples"))
                break
            size = 1 if self.prebuilt else len(batch)
            if size > rest:
                stream = chain([list(batch)[rest:]], stream)
                break
            rest -= size
            skipped += 1
        return stream, self.index_after(skipped)


_END: Any = object()


def _sized(batch: Any) -> Any:
    """A batch of indices that has a length: a batch sampler may give any iterable."""
    return batch if hasattr(batch, "__len__") else list(batch)


class Indexed:
    """The windows of a loader whose samples are dealt among ranks by index."""

    reads = "that is read by index"

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        accumulate: int,
        seed: int,
        limit: int | float | None,
        weigh: Weigh | None,
        whole: bool = False,
        total: int | None = None,
    ) -> None:
        """``total`` is the number of the user's batches in an epoch, for which they begin anew where they end.

        With ``whole`` no batch is cut.
        """
        refuse_distributed_samplers(loader, world_size)
        self._world_size, self._limit, self._weigh, self._total = world_size, limit, weigh, total
        self.batch_size = loader.batch_size
        self._source, self._text = index_source(loader), describe(loader)
        self._persistent = loader.persistent_workers and loader.num_workers > 0
        self._order = Order(loader, seed, repeats=total is not None)
        self._deal = _Deal(loader, self._order, rank, world_size, seed)
        self._deal.window_size, self._deal.whole = world_size * accumulate, whole
        self._loader = dealt_loader(loader, self._deal, seeded=self._deal.seeded)
        # Where the data stands, and what held when that epoch began
        self._epoch = self._position = 0
        self._running = self._finished = False
        self._generators: dict[str, Any] = {}
        self._workers_live = self._workers_lived = False
        self._resumed: dict[str, Any] | None = None
        if limit != 0 and self.user_batches == 0:
            raise DataError(f"the loader gives no batch: {self._text}.")

    @property
    def inexact(self) -> str | None:
        """Any position can be gone to; the order of the samples may be nobody's to know."""
        return self._order.inexact

    @property
    def batches_per_update(self) -> int:
        return self._deal.window_size

    def set_accumulation(self, accumulate: int) -> None:
        self._deal.window_size = self._world_size * accumulate

    @property
    def user_batches(self) -> int | None:
        """The user's batches of all ranks in one epoch, where the sampler has a length."""
        if self._total is not None:
            return self._total
        length, limit = known_length(self._source), self._limit_batches()
        return length if limit is None else limit if length is None else min(limit, length)

    @property
    def num_batches(self) -> int | None:
        return None if (total := self.user_batches) is None else self._deal.index_after(total)

    @property
    def num_updates(self) -> int | None:
        return None if (total := self.user_batches) is None else -(-total // self.batches_per_update)

    @property
    def at_end(self) -> bool:
        """Whether the window that was handed out is the epoch's last."""
        return self._finished

    def _limit_batches(self) -> int | None:
        if self._total is not None:
            return self._total
        return limited(self._limit, known_length(self._source), self._world_size, self._text)

    def epoch(self, epoch: int, ahead: Ahead | None = None) -> Iterator[Window]:
        """The windows of one epoch, from the position that was loaded where there is one. See `TrainData.epoch`."""
        if behind(self._resumed, epoch):
            return
        if self._resumed is not None and self._resumed["finished"] and self._resumed["epoch"] == epoch - 1:
            for _ in self.epoch(epoch - 1):  # gives no window, but takes the user's generators through that epoch
                pass
        self._begin(epoch)
        given, windows = self._position > 0, self._read()
        # weighing is a collective: a rank that fails in it must not go on with the window before, as the others do not
        agreed = self._weigh is not None and self._world_size > 1
        for window, end in windows if ahead is None or agreed else one_ahead(windows, ahead):
            given = True
            self._position, self._finished = end, window.last
            yield window
        if not given and self._limit != 0:
            raise DataError(f"the loader gives no batch in epoch {epoch}: {self._text}.")
        self.end_epoch()

    def _read(self) -> Iterator[tuple[Window, int]]:
        """The windows of the epoch that was begun, and where the data stands after each."""
        plans, weigh, world_size = self._deal.plans, self._weigh, self._world_size
        iterator = iter(self._loader)
        self._workers_live = self._persistent
        for batch in iterator:
            if not plans:
                raise DataError(self._broken("more"))
            window, end = plans.popleft()
            batches = window.batches
            batches[0].batch = batch
            if len(batches) > 1:
                for micro in islice(batches, 1, None):
                    try:
                        micro.batch = next(iterator)
                    except StopIteration:
                        raise DataError(self._broken("fewer")) from None
            if weigh is not None:
                weigh_(window, weigh, world_size)  # a collective: every rank has this window
            yield window, end
        if plans:
            raise DataError(self._broken("fewer"))

    def _begin(self, epoch: int) -> None:
        deal_, resumed, self._resumed = self._deal, self._resumed, None
        if resumed is not None and resumed["epoch"] != epoch:
            raise DataError(f"the training data stands in epoch {resumed['epoch']}, but epoch {epoch} was asked for.")
        self._epoch = deal_.epoch = epoch
        self._position = deal_.skip = resumed["position"] if resumed else 0
        self._finished = bool(resumed and resumed["finished"])
        self._workers_lived = bool(resumed["workers_lived"]) if resumed else self._workers_live
        deal_.limit = self._limit_batches()
        self._order.set_epoch(epoch)
        if resumed is not None:
            self._order.load(resumed["generators"], workers_kept=self._workers_lived)
        self._generators = self._order.state()
        self._running = True

    def keep_order(self) -> None:
        self._order.keep()

    def end_epoch(self) -> None:
        """The next epoch comes next, from its beginning."""
        self._epoch, self._position, self._running, self._finished = self._epoch + 1, 0, False, False

    def close(self) -> None:
        """See `TrainData.close`."""
        self._loader = copy_loader(self._loader)  # the workers belong to the copy that is let go

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands after the last window that was handed out, as plain data; the same on all ranks."""
        if self._resumed is not None:  # nothing was read since
            return {**self._resumed, "batches_per_update": self.batches_per_update, "batch_size": self.batch_size}
        return {
            "epoch": self._epoch,
            "position": self._position,
            "finished": self._finished,
            "batches_per_update": self.batches_per_update,
            "batch_size": self.batch_size,
            "generators": self._generators if self._running else self._order.state(),
            "workers_lived": self._workers_lived if self._running else self._workers_live,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the next call of `epoch` has to be for that epoch, or for the next if it was finished."""
        if (samples := self._samples()) is not None and state["position"] > samples:
            raise CheckpointError(beyond(state["position"], samples, "samples"))
        size = state["batches_per_update"]
        if state["batch_size"] and self.batch_size and state["batch_size"] != self.batch_size:
            size, rest = divmod(size * state["batch_size"], self.batch_size)
            if rest:
                total = state["batches_per_update"] * state["batch_size"]
                raise DataError(
                    f"the checkpoint's updates hold {total} samples, which batches of {self.batch_size} cannot make. "
                    f"Use a loader with batch_size {state['batch_size']}, or one that divides {total}."
                )
        self._deal.window_size = size
        self._loader = copy_loader(self._loader)  # without workers that live on from an epoch before
        self._workers_live = self._running = False
        self._epoch, self._position, self._resumed = state["epoch"], state["position"], state

    def _samples(self) -> int | None:
        """The most that an epoch can have, where that is known without reading the sampler."""
        batches = known_length(self._source) if self._total is None else self._total
        size = 1 if self._deal.prebuilt else self.batch_size
        return None if batches is None or size is None else batches * size

    def _broken(self, what: str) -> str:
        return (
            f"{type(self._loader).__name__} gave {what} batches than its batch sampler named. A loader whose __iter__ "
            "drops, joins or adds batches cannot be dealt by index: let it read its own rank's part and pass "
            "trivet.data.sharding.already_sharded(loader)."
        )


def dealt_loader(loader: DataLoader[Any], deal_: Any, *, seeded: bool) -> DataLoader[Any]:
    """A copy of the loader that draws its indices from ``deal_``."""
    replaced: dict[str, Any] = {"sampler" if loader.batch_sampler is None else "batch_sampler": deal_}
    if seeded:
        replaced["dataset"] = seeded_dataset(loader)
    if loader.num_workers > 0:
        replaced["in_order"] = True  # a batch is told from the others by its turn
    return copy_loader(loader, **replaced)
