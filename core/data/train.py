"""Training data: windows of micro-batches, one window per update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import CheckpointError, ConfigurationError, DataError
from .combined import Combined, is_dealt, own_part
from .indexed import Indexed
from .sharding import is_indexed
from .stream import Stream
from .window import Ahead, Weigh, Window

UNEVEN = ("error", "drop", "join")

__all__ = ["TrainData", "Window"]


class TrainData:
    """One rank's side of the training data.

    The unit of order is the global batch of an update: ``world_size * accumulate`` batches of the user's loader, in the
    order of the user's sampler. A loader that is read by index is dealt here, so another world size keeps order and
    global batch; any other is read by each rank for itself (`sharding.local_part`). ``uneven`` says what happens when
    such parts have different lengths: ``"error"``, ``"drop"`` or ``"join"``. ``limit`` is a number of batches per rank
    and epoch (int) or a fraction of the epoch (float). ``weigh(batch)`` gives what a batch counts for, instead of its
    samples, or None where samples shall count; a batch whose samples are not known (prebuilt, or not from a torch
    DataLoader) counts as 1. Seeds follow from ``seed``, epoch and position.

    Raises DataError for data that cannot be shared out or is empty.
    """

    def __init__(
        self,
        loader: Any,
        *,
        rank: int,
        world_size: int,
        accumulate: int,
        seed: int,
        uneven: str = "error",
        limit: int | float | None = None,
        weigh: Weigh | None = None,
    ) -> None:
        if uneven not in UNEVEN:
            raise ConfigurationError(f"uneven={uneven!r} is not known; expected one of {', '.join(map(repr, UNEVEN))}.")
        self._source: Indexed | Stream | Combined
        if is_dealt(loader, world_size):
            self._source = Combined(
                loader, rank=rank, world_size=world_size, accumulate=accumulate, seed=seed, limit=limit, weigh=weigh
            )
        elif is_indexed(loader):
            self._source = Indexed(
                loader, rank=rank, world_size=world_size, accumulate=accumulate, seed=seed, limit=limit, weigh=weigh
            )
        else:
            self._source = Stream(
                own_part(loader, rank, world_size),
                rank=rank,
                world_size=world_size,
                accumulate=accumulate,
                seed=seed,
                uneven=uneven,
                limit=limit,
                weigh=weigh,
            )

    @property
    def num_batches(self) -> int | None:
        """Micro-batches of this rank in one epoch; None where the loader has no length."""
        return self._source.num_batches

    @property
    def num_updates(self) -> int | None:
        """Windows in one epoch; None where the loader has no length."""
        return self._source.num_updates

    @property
    def batches_per_update(self) -> int:
        """The user's batches in one global batch. After resume the checkpoint's, whatever ``accumulate`` says."""
        return self._source.batches_per_update

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a whole global batch; None where the loader's batch size is not known."""
        size = self._source.batch_size
        return None if size is None else size * self.batches_per_update

    def set_accumulation(self, accumulate: int) -> None:
        """Take so many micro-batches of each rank together, from the next epoch on."""
        self._source.set_accumulation(accumulate)

    def epoch(self, epoch: int, ahead: Ahead | None = None) -> Iterator[Window]:
        """The windows of an epoch, from where the loaded state stands. All ranks iterate, in the same turns.

        A window counts as consumed when it is handed out. Where data is read by index, ``ahead`` is called with each
        but the first one turn early.
        """
        return self._source.epoch(epoch, ahead)

    def end_epoch(self) -> None:
        """Leave the rest of the running epoch out: the position is the beginning of the next one."""
        self._source.end_epoch()

    def close(self) -> None:
        """End the loader's workers, where they live on from epoch to epoch."""
        self._source.close()

    def keep_order(self) -> None:
        """Give the first epoch's order in all of them, to see the same batches again under a limit."""
        self._source.keep_order()

    @property
    def inexact(self) -> str | None:
        """Why training cannot go on exactly where the loaded state stands, if it cannot."""
        return self._source.inexact

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain data, the same on all ranks. All ranks call it (see `Stream.state_dict`)."""
        return {"reads": self._source.reads, **self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, epochs: int | None = None) -> None:
        """Go on where the state stands: `epoch` has to be called for its epoch next.

        ``epochs``: how many the run has completed. Raises CheckpointError, with nothing changed, for a position that
        does not belong there or that the data does not have."""
        reads = state.get("reads", "of no known kind")
        if reads != self._source.reads:
            raise DataError(
                f"the checkpoint holds the position in a loader {reads}, and this run has one {self._source.reads}. "
                "Resume with the same kind of loader."
            )
        for one in (state, *state.get("loaders", ())):
            for name, least in (("batches_per_update", 1), ("epoch", 0), ("position", 0)):
                if name in one and (type(one[name]) is not int or one[name] < least):
                    raise CheckpointError(
                        f"the checkpoint's position in the training data is damaged: {name} is {one[name]!r}, expected "
                        f"a number from {least} up. Resume from another checkpoint."
                    )
            if epochs is not None and "epoch" in one:
                left = one["epoch"] == epochs + 1 and not one["position"]  # while its end was on the way
                ended = one["epoch"] == epochs - 1 and bool(one.get("finished"))
                if not (one["epoch"] == epochs or left or ended):
                    raise CheckpointError(
                        f"the checkpoint's position in the training data is damaged: it is in epoch {one['epoch']}, "
                        f"and {epochs} epochs are completed. Resume from another checkpoint."
                    )
        self._source.load_state_dict(state)
