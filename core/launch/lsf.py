"""LSF: a task that jsrun started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ConfigurationError
from .environment import Environment
from .variables import INSIDE, address, missing, number, place, port, said, started_by_torchrun
from .world import World

_TASK = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")


class LSF(Environment):
    """jsrun, the job step manager of LSF. ``bsub`` alone starts one process, which is not its task."""

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if _why_not(environ):
            return None
        missing(environ, (*_TASK, "LSB_JOBID"), "jsrun")
        rank, size, local_rank, local_size = (number(environ, name) for name in _TASK)
        world = place(rank, size, local_rank, local_size, "lsf")
        job = port(environ["LSB_JOBID"])
        if world.num_nodes == 1 or environ.get("MASTER_ADDR"):
            return replace(world, address=address(environ, "127.0.0.1", job))
        hosts = _hosts(environ)
        if len(hosts) == world.num_nodes + 1:
            hosts = hosts[1:]  # the job script's own node, on which jsrun starts nothing
        if len(hosts) < world.num_nodes:
            raise ConfigurationError(
                f"jsrun started tasks on {world.num_nodes} nodes, but LSB_MCPU_HOSTS and LSB_HOSTS name only {hosts}. "
                "Set MASTER_ADDR to the host of rank 0."
            )
        return replace(world, address=address(environ, hosts[0], job))

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        if why := _why_not(environ):
            return (why,)
        return said(environ, ("LSB_JOBID", *_TASK, "LSB_DJOB_NUMPROC", "LSB_MCPU_HOSTS", "LSB_HOSTS"))


def _why_not(environ: Mapping[str, str]) -> str:
    if not environ.get("JSM_NAMESPACE_RANK"):
        inside = environ.get("LSB_JOBID")
        return f"no task of jsrun's: one process in job {inside}" if inside else "JSM_NAMESPACE_RANK is not set"
    return INSIDE if started_by_torchrun(environ) else ""


def _hosts(environ: Mapping[str, str]) -> list[str]:
    """The hosts of the job, each once: ``LSB_MCPU_HOSTS`` is ``host1 42 host2 42``, ``LSB_HOSTS`` repeats them."""
    pairs = environ.get("LSB_MCPU_HOSTS", "").split()
    return list(dict.fromkeys(pairs[::2] or environ.get("LSB_HOSTS", "").split()))
