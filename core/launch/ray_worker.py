"""Ray: a worker that was told its rank, by Ray Train or by the actors' owner."""

from __future__ import annotations

from collections.abc import Mapping

from .environment import Environment
from .variables import INSIDE, said, started_by_torchrun
from .world import World

_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Ray(Environment):
    """A process of Ray's with torch's variables. The entrypoint of a Ray job has none: it is one process."""

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if _why_not(environ):
            return None
        from .torchrun import from_variables

        named = dict(environ)
        if environ.get("NODE_RANK"):  # Ray Train's name for it
            named.setdefault("GROUP_RANK", environ["NODE_RANK"])
        return from_variables(named, source="ray")

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        why = _why_not(environ)
        return (why,) if why else said(environ, (*_WORKER, *_RANKS))


def is_worker(environ: Mapping[str, str]) -> bool:
    """Whether a raylet started this process, or one that started it."""
    return any(environ.get(name) for name in _WORKER)


def _why_not(environ: Mapping[str, str]) -> str:
    if started_by_torchrun(environ):
        return INSIDE
    if not is_worker(environ):
        return f"none of {', '.join(_WORKER)} is set"
    if not environ.get("RANK"):
        return "a process of Ray's without RANK: one process; --launcher ray starts others"
    return ""
