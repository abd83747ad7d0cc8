"""torchrun: who started this process, read from the variables of torch's elastic agent."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigurationError
from .environment import Environment
from .world import World

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class Torchrun(Environment):
    """torchrun, or whoever sets the same variables (by hand, for example).

    ``MASTER_ADDR`` and ``MASTER_PORT`` alone say nothing: clusters set them for every process.
    """

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if not any(environ.get(name) for name in _RANKS):
            return None
        return from_variables(environ, source="torchrun")

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        found = tuple(f"{name}={environ[name]} is set" for name in _RANKS if environ.get(name))
        return found or (f"none of {', '.join(_RANKS)} is set",)


def from_variables(values: Mapping[str, str], *, source: str) -> World:
    """Build the world from torch elastic's variables; also called by workers of the local launcher."""
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
