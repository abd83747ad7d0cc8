"""What the environments have in common: reading their variables, and working out what they leave unsaid."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from ..errors import ConfigurationError
from .world import World

ELASTIC = "TORCHELASTIC_RUN_ID"
"""torch's agent sets it for the processes that it starts, and for nobody else."""

_PORTS = range(15_000, 30_000)  # below what systems hand out on their own account


def started_by_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torch's agent started this very process, whoever started the agent."""
    return bool(environ.get(ELASTIC) and environ.get("LOCAL_RANK"))


INSIDE = f"{ELASTIC} is set: torchrun started this process inside of the job"


def number(values: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """A variable as a number from 0 up. Raises ConfigurationError where it is none, or is missing without default."""
    text = values.get(name)
    if not text and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigurationError(f"the environment variable {name} is {text!r}; expected a number from 0 up.")
    return int(text)


def said(environ: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
    """``"NAME=value is set"`` for each that is."""
    return tuple(f"{name}={environ[name]} is set" for name in names if environ.get(name))


def missing(environ: Mapping[str, str], names: Iterable[str], who: str) -> None:
    """Raise ConfigurationError where some of the variables that belong together are not there."""
    names = list(names)
    if lacking := [name for name in names if not environ.get(name)]:
        found = {name: environ[name] for name in names if environ.get(name)}
        raise ConfigurationError(
            f"{who} describes this process in part: beside {found!r} there is no {', '.join(lacking)}. "
            "Hand on all of its variables, or set TRIVET_ENVIRONMENT=none to start without it."
        )


def port(job: str, step: int = 0) -> int:
    """The port at which the processes of a job meet: the same in all of them, another one for the next job and step."""
    seed = int(job) if job.isdecimal() else zlib.crc32(job.encode())
    return _PORTS[(seed + 7919 * step) % len(_PORTS)]


def address(environ: Mapping[str, str], host: str, number: int) -> str:
    """``host:port``, where ``MASTER_ADDR`` and ``MASTER_PORT`` rule if they are set."""
    host = environ.get("MASTER_ADDR") or host
    return f"{f'[{host}]' if ':' in host else host}:{environ.get('MASTER_PORT') or number}"


def place(rank: int, size: int, local_rank: int, local_size: int, source: str) -> World:
    """The world of a launcher that does not say which node this is.

    Ranks are then dealt to the nodes in blocks (0 1 | 2 3), or, where this rank contradicts that, in turn (0 2 | 1 3).
    """
    for name, value, bound in (("rank", rank, size), ("rank on this node", local_rank, local_size)):
        if value >= bound:
            raise ConfigurationError(f"{source}: the {name} is {value}, which is not below {bound}.")
    if size % local_size:
        raise ConfigurationError(
            f"{source} started {local_size} of {size} processes on this node, so not as many on every node. Start the "
            "same number on each."
        )
    num_nodes = size // local_size
    node = rank // local_size if rank % local_size == local_rank else rank % num_nodes
    return World(rank, size, local_rank, local_size, node, num_nodes, source)
