"""Place: where a rank is in its work, read off the stack of the thread that works, which notes nothing for it."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

from ..torch_compat import collectives_begun
from . import alone

_COLLECTIVES = "torch.distributed.distributed_c10d"
_INSTALLED = tuple(f"{path}/" for name in ("stdlib", "platstdlib", "purelib") if (path := sysconfig.get_path(name)))


@dataclass(frozen=True)
class Place:
    """``where``: the hook or step. ``at``: the user's line. ``waits``: the collective or other operation that it is in,
    or "". ``calls``: collectives of the default process group that this rank has begun. ``plain``: whether ``waits`` is
    a collective of that group. ``guarded``: whether it is inside of `trivet.rank_zero`. ``still``: seconds since it
    last got on. ``stack``: as a traceback has it, from the user's first frame on.
    """

    rank: int
    progress: str
    where: str
    at: str
    waits: str = ""
    calls: int = 0
    plain: bool = False
    guarded: bool = False
    still: float = 0.0
    stack: str = ""

    @property
    def exchanges(self) -> bool:
        """Whether it waits for messages of the other ranks, outside of torch."""
        return self.waits.startswith("exchange of ")

    @property
    def compares(self) -> bool:
        """Whether it asks the others for a change of its own: soon, where they had none, it raises and names that."""
        return self.waits.startswith("exchange of 'same/")

    def __str__(self) -> str:
        if self.plain or self.waits == "backward":
            doing = f"waits in {self.waits} (collective {self.calls})"
        else:
            doing = f"waits in {self.waits}" if self.waits else "is"
        inside = ", inside trivet.rank_zero" if self.guarded else ""
        return f"rank {self.rank} {doing}{inside} at {self.at}, in {self.where} ({self.progress})"


def of_thread(ident: int, rank: int, progress: str, still: float = 0.0, *, with_stack: bool = True) -> Place:
    """Where a thread of this process is now."""
    frames = list(_outwards(sys._current_frames().get(ident)))[::-1]
    lines = [frame.f_lineno for frame in frames]
    stack = ""
    if frames and with_stack:
        stack = "".join(traceback.format_list(traceback.extract_stack(frames[-1])[_first(frames) :]))
    return _of(frames, lines, Place(rank, progress, "", "", guarded=alone.entered(ident), still=still, stack=stack))


def fingerprint(ident: int) -> int:
    """Changes where a thread gets on, unless it is back at the same place."""
    return hash(tuple((frame.f_code, frame.f_lasti) for frame in _outwards(sys._current_frames().get(ident))))


def of_traceback(trace: TracebackType | None, rank: int, progress: str) -> Place:
    """Where an exception was raised."""
    frames, lines = [], []
    while trace is not None:
        frames.append(trace.tb_frame)
        lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return _of(frames, lines, Place(rank, progress, "", "", guarded=alone.entered(threading.get_ident())))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _first(frames: list[FrameType]) -> int:
    """The user's first frame within the run, else ours."""
    ours = next((i for i, frame in enumerate(frames) if _is_ours(frame)), 0)
    return next((i for i, frame in enumerate(frames) if i > ours and is_users(frame)), ours)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_ours(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] == "trivet"


def _is_torchs(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] == "torch"


def is_users(frame: FrameType) -> bool:
    """Whether a frame is neither ours nor of anything that is installed."""
    path = frame.f_code.co_filename
    return not (_is_ours(frame) or _is_torchs(frame) or path.startswith(("<frozen", *_INSTALLED)))


def _of(frames: list[FrameType], lines: list[int], known: Place) -> Place:
    first = next((i for i, frame in enumerate(frames) if _is_ours(frame)), 0)
    inner = list(zip(frames, lines, strict=True))[first:]
    users = [(frame, line) for frame, line in inner if is_users(frame)]
    called = users[:1] or [pair for pair in inner if _is_ours(pair[0])][-1:]
    at = (users or inner)[-1:]
    waits, plain = _waits([frame for frame, _ in inner])
    return replace(
        known,
        where=called[0][0].f_code.co_qualname if called else "no code of a run",
        at=f"{at[0][0].f_code.co_filename}:{at[0][1]}" if at else "an unknown line",
        waits=waits,
        plain=plain,
        calls=collectives_begun(),
    )


def _waits(frames: list[FrameType]) -> tuple[str, bool]:
    """The operation that the innermost frames are in, and whether it is a collective of the default group."""
    found, plain = "", False
    for frame in reversed(frames):
        name, module = frame.f_code.co_name, _module(frame)
        if is_users(frame):
            break
        if name == "<module>" and _is_torchs(frame):  # what torch does while it is imported is no waiting
            return "", False
        if (name.startswith("__") and name != "__next__") or name == "<module>":
            continue
        if module == _COLLECTIVES and not name.startswith("_"):
            found, plain = name, _is_default(frame.f_locals.get("group"))
        elif found:
            continue
        elif module == "trivet.launch.group" and name == "exchange":
            return f"exchange of {frame.f_locals.get('key')!r}", False
        elif module == "torch.autograd.graph" and name == "_engine_run_backward":
            found = "backward"
        elif module == "torch.utils.data.dataloader" and name == "__next__":
            return "the next batch of a DataLoader", False
        elif module.startswith(("torch.distributed.", "torch.nn.parallel.distributed")):
            found = name.lstrip("_")
    return found, plain


def _is_default(group: Any) -> bool:
    import torch.distributed as dist

    return group is None or group is dist.group.WORLD
