"""The guard `trivet.rank_zero`: what is done on rank 0 alone, and knows that no collective may be called in it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ..errors import CollectiveError
from . import environments
from .world import LAUNCH_DIR

if TYPE_CHECKING:
    from ..metrics import Where

P = ParamSpec("P")
T = TypeVar("T")

inside: dict[int, list[int]] = {}
"""By thread that is inside of the guard, for each of its entries how many collectives had begun; empty elsewhere."""


class RankZero:
    """Rank 0's own work, as a decorator or as a context.

    A decorated function runs on rank 0 and returns None on the others. The context runs on all ranks and says whether
    this one is rank 0::

        @trivet.rank_zero
        def report(self): ...

        with trivet.rank_zero as here:
            if here:
                ...

    In both a collective would wait for ranks that never come. Trivet's own, such as ``self.all_gather``,
    ``self.log(..., sync_dist=True)`` and ``trainer.save_checkpoint``, raise CollectiveError at once, on the line that
    calls them, also where there is one process. One of torch's is noticed when it waits, and at the guard's end.
    """

    def __call__(self, function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            with self as here:
                return function(*args, **kwargs) if here else None

        return guarded

    def __enter__(self) -> bool:
        inside.setdefault(threading.get_ident(), []).append(_collectives())
        return _rank() == 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entries = inside[threading.get_ident()]
        count = _collectives() - entries.pop()
        if not entries:
            del inside[threading.get_ident()]
        if kind is None and count > 0:
            raise CollectiveError(
                f"{count} collective{'s' if count > 1 else ''} of torch.distributed began inside trivet.rank_zero, "
                "where the other ranks never come, so that the ranks' collectives no longer belong together. Call "
                "them outside, on all ranks."
            )


rank_zero = RankZero()


def entered(ident: int) -> bool:
    """Whether a thread is inside of the guard."""
    return ident in inside


def refuse(what: str, remedy: str = "Call it outside, on all ranks.") -> None:
    """Raise CollectiveError where this thread is inside of the guard. ``what`` is a collective of Trivet's."""
    if inside and entered(threading.get_ident()):
        raise CollectiveError(
            f"{what} inside trivet.rank_zero: all ranks have to take part in it, and the others never come here. "
            f"{remedy}"
        )


def refuse_log(
    name: str, where: Where | None, on_epoch: bool | None, sync: bool | str | None, rank_zero_only: bool
) -> None:
    """`refuse` what ``log`` is told to reduce over ranks; ``where`` says whether it does so by default."""
    epoch = where is not None and where.on_epoch if on_epoch is None else on_epoch
    if (sync or epoch) and sync != "sparse" and not rank_zero_only:
        remedy = "Log it outside, or with rank_zero_only=True where it is rank 0's own."
        refuse(f"log({name!r}), a value that is reduced over ranks,", remedy)


def _rank() -> int:
    if os.environ.get(LAUNCH_DIR):  # a worker of Trivet's
        return int(os.environ["RANK"])
    world = environments.detect()
    return 0 if world is None else world.rank


def _collectives() -> int:
    from ..torch_compat import collectives_begun

    return collectives_begun()
