"""torchrun: who started this process, read from the variables of torch's elastic agent."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigurationError
from .environment import Environment
from .kubeflow import is_pod_of_pytorchjob
from .ray_worker import is_worker
from .variables import ELASTIC, number, said, started_by_torchrun
from .world import World

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class Torchrun(Environment):
    """torchrun, or whoever sets the same variables (by hand, for example).

    ``MASTER_ADDR`` and ``MASTER_PORT`` alone say nothing: clusters set them for every process. Where torch's agent was
    itself started by srun, mpirun or a pod, ``TORCHELASTIC_RUN_ID`` says that this process is the agent's.
    """

    def detect(self, environ: Mapping[str, str]) -> World | None:
        return None if _why_not(environ) else from_variables(environ, source="torchrun")

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        why = _why_not(environ)
        return (why,) if why else said(environ, (*_RANKS, ELASTIC))


def _why_not(environ: Mapping[str, str]) -> str:
    if not any(environ.get(name) for name in _RANKS):
        return f"none of {', '.join(_RANKS)} is set"
    if started_by_torchrun(environ):
        return ""
    if is_pod_of_pytorchjob(environ):
        return "RANK and WORLD_SIZE without LOCAL_RANK, in a pod: a PyTorchJob's"
    if is_worker(environ):
        return "RANK in a process of Ray's"
    if environ.get("SLURM_STEP_ID") and not environ.get("RANK") and not environ.get("LOCAL_RANK"):
        return "WORLD_SIZE without RANK, in a step of srun's: exported by the batch script"
    return ""


def from_variables(values: Mapping[str, str], *, source: str) -> World:
    """Build the world from torch elastic's variables; also called by workers of the local launcher."""
    missing = [name for name in (*_RANKS, *_ADDRESS) if not values.get(name)]
    if missing:
        found = {name: values[name] for name in (*_RANKS, *_ADDRESS) if values.get(name)}
        raise ConfigurationError(
            f"the environment describes a launched process in part: beside {found!r} there is no {', '.join(missing)}. "
            f"Start with torchrun, which sets all of them, or unset {', '.join(found)}."
        )
    rank, world_size, local_rank, local_world_size = (number(values, name) for name in _RANKS)
    number(values, "MASTER_PORT")
    node_rank = number(values, "GROUP_RANK", default=rank // max(local_world_size, 1))
    num_nodes = number(values, "GROUP_WORLD_SIZE", default=-(-world_size // max(local_world_size, 1)))
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
