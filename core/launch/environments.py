"""Environments: who started this process, read from the variables that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..errors import ConfigurationError
from .world import World

LAUNCH_DIR = "TRIVET_LAUNCH_DIR"
"""Set in workers of the local launcher, so that torch elastic's variables are not taken for torchrun's there."""

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def detect(environ: Mapping[str, str] | None = None) -> World | None:
    """Return the world that torchrun announced to this process, or None where no launcher did.

    Pure in ``environ`` (default: ``os.environ``). ``MASTER_ADDR`` and ``MASTER_PORT`` alone say nothing: clusters set
    them for every process. Raises ConfigurationError if only some of the variables are set, or if they contradict.
    """
    values = os.environ if environ is None else environ
    if values.get(LAUNCH_DIR) or not any(values.get(name) for name in _RANKS):
        return None
    return from_variables(values, source="torchrun")


def from_variables(values: Mapping[str, str], *, source: str) -> World:
    """Build the world from torch elastic's variables; called by `detect` and by workers of the local launcher."""
    missing = [name for name in (*_RANKS, *_ADDRESS) if not values.get(name)]
    if missing:
        found = {name: values[name] for name in (*_RANKS, *_ADDRESS) if values.get(name)}
        raise ConfigurationError(
            f"the environment describes a launched process in part: beside {found!r} there is no {', '.join(missing)}. "
            f"Start with torchrun, which sets all of them, or unset {', '.join(found)}."
        )
    rank, world_size, local_rank, local_world_size = (_number(values, name) for name in _RANKS)
    _number(values, "MASTER_PORT")
    node_rank = _number(values, "GROUP_RANK", default=rank // max(local_world_size, 1))
    num_nodes = _number(values, "GROUP_WORLD_SIZE", default=-(-world_size // max(local_world_size, 1)))
    for name, value, size_name, size in (
        ("RANK", rank, "WORLD_SIZE", world_size),
        ("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size),
        ("GROUP_RANK", node_rank, "GROUP_WORLD_SIZE", num_nodes),
    ):
        if value >= size:
            raise ConfigurationError(
                f"{name}={value} is not below {size_name}={size}: the launcher's variables disagree."
            )
    return World(rank, world_size, local_rank, local_world_size, node_rank, num_nodes, source)


def _number(values: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = values.get(name)
    if not text and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigurationError(f"the environment variable {name} is {text!r}; expected a number from 0 up.")
    return int(text)
