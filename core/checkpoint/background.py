"""Writing checkpoints behind the training: one at a time, from a copy of the state at the moment of the call."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CheckpointError
from ..layout import sharded
from ..state import TrainState
from .agree import agreed
from .files import Place, place
from .parts import RANKS, TENSORS, errors
from .places import locked
from .sums import Sum
from .writing import Draft, header, prepare, split

if TYPE_CHECKING:
    from .staging import Buffers


class Pending:
    """A checkpoint that is being written behind the training."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.told = False  # whether somebody knows of its failure
        self._error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is being written, and when it is complete."""
        return self._error

    def join(self) -> None:
        """Wait until it is complete, or has failed."""
        self._ended.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; raises `CheckpointError` if it could not be written."""
        self.join()
        if self._error is not None:
            self.told = True
            raise self._error

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()


class Background:
    """Saves of one run, one in flight at a time. All ranks make one, and call its methods together.

    The threads that write speak with each other through a process group of their own, so that their collectives never
    meet those of the training. It is made at the first save, and the buffers for copies too; they stay until `close`.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._saves: list[Pending] = []  # the newest, and those whose failure nobody knows of
        self._buffers: Buffers | None = None
        self._group: dist.ProcessGroup | None = None

    def start(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        *,
        metrics: dict[str, float] | None = None,
        published: Callable[[], None] = lambda: None,
    ) -> Pending:
        """Begin to write ``state`` as it is now; see `writing.write`. Returns when it is copied and may change.

        First waits for the save before. ``published`` is called on rank 0, by the thread that writes, when the
        checkpoint is complete. Raises on all ranks what prevents the beginning; the rest is raised by `Pending.wait`.
        """
        from . import staging

        self.join()
        if self._buffers is None:
            self._buffers = staging.Buffers()
            if self.world_size > 1:
                self._group = dist.new_group(backend="gloo")  # all ranks
        target = place(path)
        what = f"cannot write checkpoint {str(target)!r}"
        pending = Pending(str(target))
        with errors(what), ExitStack() as leaving:
            tensors, plain = split(state)
            held, content = _replicated(tensors), io.BytesIO()

            def begin() -> tuple[Place, str]:
                temporary = prepare(target, plain)
                torch.save(plain, content)  # now, since training goes on with what is in it
                return temporary, held

            temporary, held_by_rank_0 = agreed(begin, rank=self.rank, world_size=self.world_size)
            draft = Draft(
                temporary, target, lambda file: file.write(content.getbuffer()), header(state, metrics, self.world_size)
            )
            leaving.callback(draft.discard, self.rank)  # nothing is left to discard of one that is complete
            leaving.enter_context(locked(temporary, self.rank == 0))
            if self.rank and held == held_by_rank_0:  # rank 0 writes what is not sharded
                tensors = {name: tensor for name, tensor in tensors.items() if not _is_replicated(name, tensor)}

            def finish(sums: dict[str, Sum]) -> None:
                draft.finish(sums)
                published()

            future = staging.write_behind(temporary / TENSORS, tensors, self._buffers, group=self._group, finish=finish)
            self._saves.append(pending)
            future.add_done_callback(partial(_end, pending, what, leaving.pop_all()))
        return pending

    def join(self) -> None:
        """Wait until no save is in flight."""
        for pending in self._saves:
            pending.join()
        self._saves = [pending for pending in self._saves if pending.error is not None and not pending.told]

    def settle(self) -> None:
        """Wait until no save is in flight, and raise a failure that nobody was told of."""
        self.join()
        for pending in self._saves:
            pending.wait()

    def close(self) -> None:
        """Wait until no save is in flight, and let go of buffers and process group."""
        self.join()
        self._buffers = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _end(pending: Pending, what: str, leaving: ExitStack, future: Future[Any]) -> None:
    """In the thread that wrote."""
    from .tensors import told

    failure: BaseException | None = CheckpointError(f"{what}: the thread that writes broke off")
    try:
        leaving.close()
        failure = None
        if (error := future.exception()) is not None:
            with errors(what):
                raise told(error) from error
    except BaseException as error:
        failure = error
    finally:
        pending.end(failure)


def _replicated(tensors: dict[str, Tensor]) -> str:
    """A digest of the names of tensors that all ranks hold."""
    names = sorted(name for name, tensor in tensors.items() if _is_replicated(name, tensor))
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def _is_replicated(name: str, tensor: Tensor) -> bool:
    return sharded(tensor) is None and not name.startswith(RANKS)
