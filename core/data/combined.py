"""CombinedLoader: several loaders read together, and how the core deals their batches among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import Any

from torch.utils.data import DataLoader

from ..errors import ConfigurationError, DataError
from ..plugins import MicroBatch
from ..seeding import derive
from .evaluation import EvalData
from .indexed import Indexed
from .sharding import (
    AlreadySharded,
    OwnsPosition,
    already_sharded,
    describe,
    is_indexed,
    known_length,
    limited,
    local_part,
)
from .window import Ahead, Weigh, Window, reweigh_, weigh_

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
COMBINED = 4  # which stream of random numbers, see `positions`


class CombinedLoader:
    """Several loaders in a list, a tuple or a dict, also nested, read as one.

    A batch has the same structure, with a batch of each loader in its place.

    Args:
        iterables: the loaders.
        mode: ``"min_size"`` ends with the shortest loader; ``"max_size_cycle"`` ends with the longest, and the others
            begin anew, in a new order, where they end; ``"max_size"`` ends with the longest, with None in the place of
            those that have ended; ``"sequential"`` reads one after the other (not in `Trainer.fit`).
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        if mode not in MODES:
            raise ConfigurationError(f"CombinedLoader(mode={mode!r}): allowed are {', '.join(map(repr, MODES))}.")
        self.iterables, self.mode = iterables, mode
        if not self.flattened:
            raise ConfigurationError(f"CombinedLoader({iterables!r}) holds no loader.")

    @property
    def flattened(self) -> list[Any]:
        """The loaders in one list, in the order of the structure."""
        return list(_leaves(self.iterables))

    def combine(self, parts: list[Any]) -> Any:
        """One value for each loader, in the loaders' structure."""
        return _like(self.iterables, iter(parts))

    def __iter__(self) -> Iterator[Any]:
        if self.mode == "sequential":
            yield from chain.from_iterable(self.flattened)
            return
        iterators = [iter(loader) for loader in self.flattened]
        if self.mode == "min_size":
            yield from map(self.combine, map(list, zip(*iterators, strict=False)))
        elif self.mode == "max_size":
            yield from map(self.combine, map(list, zip_longest(*iterators)))
        else:
            yield from self._cycle(iterators)

    def _cycle(self, iterators: list[Iterator[Any]]) -> Iterator[Any]:
        loaders, running = self.flattened, [True] * len(iterators)
        while True:
            parts = []
            for n, iterator in enumerate(iterators):
                part = next(iterator, _END)
                if part is _END:
                    running[n] = False
                    if not any(running):
                        return
                    iterators[n] = iter(loaders[n])
                    part = next(iterators[n], _END)
                    if part is _END:
                        raise DataError(f"{describe(loaders[n])} gives no batch, so it cannot begin anew.")
                parts.append(part)
            yield self.combine(parts)

    def __len__(self) -> int:
        lengths = [len(loader) for loader in self.flattened]
        return sum(lengths) if self.mode == "sequential" else min(lengths) if self.mode == "min_size" else max(lengths)


_END: Any = object()


def _leaves(structure: Any) -> Iterator[Any]:
    if isinstance(structure, dict):
        structure = list(structure.values())
    if isinstance(structure, (list, tuple)):
        for part in structure:
            yield from _leaves(part)
    else:
        yield structure


def _like(structure: Any, values: Iterator[Any]) -> Any:
    if isinstance(structure, dict):
        return {name: _like(part, values) for name, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        parts = [_like(part, values) for part in structure]
        return tuple(parts) if isinstance(structure, tuple) else parts
    return next(values)


def combined(loader: Any) -> Any:
    """What a fit was given, as one loader: a dict of loaders, or a list of them, is read as ``"max_size_cycle"``."""
    several = isinstance(loader, dict) or (
        isinstance(loader, (list, tuple))
        and bool(loader)
        and all(isinstance(one, (DataLoader, AlreadySharded, OwnsPosition)) for one in _leaves(loader))
    )
    found = CombinedLoader(loader, "max_size_cycle") if several else loader
    if isinstance(found, CombinedLoader) and found.mode == "sequential":
        raise ConfigurationError(
            "CombinedLoader(mode='sequential') cannot be trained on, since an update needs batches of one kind. Use "
            "'max_size_cycle', 'max_size' or 'min_size'."
        )
    return found


def evaluation_loaders(given: Any) -> list[Any]:
    """The loaders to evaluate one after the other."""
    if isinstance(given, CombinedLoader) and given.mode == "sequential":
        return given.flattened
    if isinstance(given, dict):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _total(loader: CombinedLoader, limit: int | float | None, world_size: int) -> int:
    text = f"CombinedLoader of {', '.join(map(describe, loader.flattened))}"
    allowed = limited(limit, len(loader), world_size, text)
    return len(loader) if allowed is None else min(allowed, len(loader))


def is_dealt(loader: Any, world_size: int) -> bool:
    """Whether this is a CombinedLoader whose batches the core can deal. Raises DataError for several processes where
    only some of its loaders can be dealt."""
    if not isinstance(loader, CombinedLoader):
        return False
    dealt = [one for one in loader.flattened if is_indexed(one) and known_length(one) is not None]
    others = [one for one in loader.flattened if all(one is not other for other in dealt)]
    if others and dealt and world_size > 1:
        raise DataError(
            f"a CombinedLoader holds {describe(others[0])}, which is not read by index or has no length, so its "
            f"batches cannot be dealt among {world_size} processes as those of {describe(dealt[0])} are. Let every "
            "rank read its own part of all of them, and pass trivet.data.sharding.already_sharded(combined_loader)."
        )
    return not others


def own_part(loader: Any, rank: int, world_size: int) -> Any:
    """What is not dealt, as a rank reads it: a CombinedLoader with the rank's own part of each loader."""
    if not isinstance(loader, CombinedLoader) or world_size == 1:
        return loader
    parts: list[Any] = [already_sharded(local_part(one, rank, world_size)) for one in loader.flattened]
    return already_sharded(CombinedLoader(loader.combine(parts), loader.mode))


class Combined:
    """The windows of a CombinedLoader: of each loader's own windows, batch by batch. Batches are dealt whole.

    A batch counts as many samples as its parts together, unless ``weigh`` says otherwise.
    """

    batch_size = None
    reads = "that is combined of several"

    def __init__(
        self,
        loader: CombinedLoader,
        *,
        rank: int,
        world_size: int,
        accumulate: int,
        seed: int,
        limit: int | float | None,
        weigh: Weigh | None,
    ) -> None:
        self._loader, self._world_size, self._weigh = loader, world_size, weigh
        total = _total(loader, limit, world_size)
        lengths = [len(one) for one in loader.flattened]
        cycles = loader.mode == "max_size_cycle"
        self._sources = [
            Indexed(
                one, rank=rank, world_size=world_size, accumulate=accumulate, seed=derive(seed, COMBINED, number),
                limit=None, weigh=None, whole=True, total=total if cycles else min(total, length),
            )
            for number, (one, length) in enumerate(zip(loader.flattened, lengths, strict=True))
        ]  # fmt: skip
        self._longest = self._sources[lengths.index(max(lengths))]

    @property
    def inexact(self) -> str | None:
        """What one of the loaders cannot go on with exactly."""
        return next((source.inexact for source in self._sources if source.inexact is not None), None)

    @property
    def batches_per_update(self) -> int:
        return self._longest.batches_per_update

    @property
    def num_batches(self) -> int | None:
        return self._longest.num_batches

    @property
    def num_updates(self) -> int | None:
        return self._longest.num_updates

    def epoch(self, epoch: int, ahead: Ahead | None = None) -> Iterator[Window]:
        """The windows of one epoch, from the position that was loaded where there is one; ``ahead`` has no part."""
        for windows in zip_longest(*(source.epoch(epoch) for source in self._sources)):
            yield self._join(windows)

    def _join(self, windows: tuple[Window | None, ...]) -> Window:
        given = [window for window in windows if window is not None]
        turns = max(given, key=lambda window: len(window.batches))
        batches = []
        for n, turn in enumerate(turns.batches):
            parts = [w.batches[n] if w is not None and n < len(w.batches) else None for w in windows]
            samples = sum(part.samples for part in parts if part is not None)
            held = [None if part is None or (samples and not part.samples) else part.batch for part in parts]
            batches.append(MicroBatch(self._loader.combine(held), turn.index, None, turn.last, samples))
        total = sum(window.samples for window in given)
        window = Window(batches, total, total, self._longest.at_end)
        if self._weigh is None:
            reweigh_(window, total, self._world_size)
        else:
            weigh_(window, self._weigh, self._world_size)  # a collective: every rank has this window
        return window

    def keep_order(self) -> None:
        for source in self._sources:
            source.keep_order()

    def set_accumulation(self, accumulate: int) -> None:
        """See `TrainData.set_accumulation`."""
        for source in self._sources:
            source.set_accumulation(accumulate)

    def end_epoch(self) -> None:
        """The next epoch comes next, from its beginning."""
        for source in self._sources:
            source.end_epoch()

    def close(self) -> None:
        """See `TrainData.close`."""
        for source in self._sources:
            source.close()

    def state_dict(self) -> dict[str, Any]:
        """Where each loader stands."""
        return {"loaders": [source.state_dict() for source in self._sources]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        states = state["loaders"]
        if len(states) != len(self._sources):
            raise DataError(
                f"the checkpoint's training data was of {len(states)} loaders, this CombinedLoader holds "
                f"{len(self._sources)}."
            )
        for source, one in zip(self._sources, states, strict=True):
            source.load_state_dict(one)


class CombinedEval(EvalData):
    """One rank's side of a CombinedLoader that is evaluated: combined batch ``j`` goes to rank ``j % world_size``."""

    def __init__(
        self, loader: CombinedLoader, *, rank: int, world_size: int, seed: int, limit: int | float | None = None
    ) -> None:
        total = _total(loader, limit, world_size)
        cycles = loader.mode == "max_size_cycle"
        self._combine: Callable[[list[Any]], Any] = loader.combine
        self.indices = None
        self._parts = [
            EvalData(
                one, rank=rank, world_size=world_size, seed=derive(seed, COMBINED, number), repeats=cycles,
                total=total if cycles else min(total, len(one)),
            )
            for number, one in enumerate(loader.flattened)
        ]  # fmt: skip
        self._rank, self._world_size, self._total = rank, world_size, total

    def __iter__(self) -> Iterator[tuple[Any, int, float]]:
        for parts in zip_longest(*self._parts):
            held = [None if part is None else part[0] for part in parts]
            number = next(part[1] for part in parts if part is not None)
            samples = sum(part[2] for part in parts if part is not None)
            indices = [None if p is None else data.indices for p, data in zip(parts, self._parts, strict=True)]
            self.indices = self._combine(indices)
            yield self._combine(held), number, samples

    def __len__(self) -> int:
        return max(0, -(-(self._total - self._rank) // self._world_size))

    def close(self) -> None:
        for part in self._parts:
            part.close()


def eval_data(loader: Any, *, rank: int, world_size: int, seed: int, limit: int | float | None) -> EvalData:
    """One rank's side of a loader that is evaluated."""
    kind = CombinedEval if is_dealt(loader, world_size) else EvalData
    return kind(loader, rank=rank, world_size=world_size, seed=seed, limit=limit)
