"""SLURM: a task that ``srun`` started, and nothing else that runs in an allocation."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigurationError
from . import nodelist
from .environment import Environment
from .ray_worker import is_worker
from .variables import INSIDE, address, missing, number, port, said, started_by_torchrun
from .world import World

_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_SRUN_COMM_HOST")
_SPECIAL_STEPS = 0xFFFFFFF0
"""Numbers from here up are no steps of srun's: batch scripts, interactive sessions, and what ssh brought."""

_SHELLS = frozenset({"bash", "sh", "zsh", "fish", "tcsh", "csh", "interactive"})
"""Names that jobs have when they were started to type in: that of the shell, and that of a bare salloc."""


class Slurm(Environment):
    """A task of ``srun``.

    A batch script has SLURM_PROCID=0 too, but no step; a shell of ``srun --pty`` or of ``salloc`` is a step of its own.
    In both, what the user starts is one process that knows of no others. Within such a session ``srun`` starts tasks as
    everywhere. mpirun and torchrun started by srun are what started their processes; srun's numbers are then theirs.
    """

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if _why_not(environ):
            return None
        missing(environ, _TASK, "srun")
        size = _tasks(environ)
        rank, local, node = (number(environ, name) for name in _TASK)
        names = nodelist.hosts(_first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
        per_node = nodelist.counts(
            _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", default=str(size))
        )
        if (
            environ.get("SLURM_STEP_NUM_TASKS") and sum(per_node) != size
        ):  # the job's, where the step's is not handed on
            raise ConfigurationError(f"srun started {size} tasks, but on the nodes there are {per_node}.")
        if rank >= size or node >= len(per_node) or local >= per_node[node]:
            raise ConfigurationError(
                f"srun's variables disagree: SLURM_PROCID={rank}, SLURM_NODEID={node} and SLURM_LOCALID={local} among "
                f"{size} tasks, {per_node} on the nodes."
            )
        host = names[0] if len(per_node) > 1 else "127.0.0.1"
        number_of_port = port(_first(environ, "SLURM_JOB_ID", "SLURM_JOBID"), _step(environ))
        where = address(environ, host, number_of_port)
        return World(rank, size, local, per_node[node], node, len(per_node), "slurm", where)

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        if why := _why_not(environ):
            return (why,)
        return said(environ, ("SLURM_JOB_ID", "SLURM_STEP_ID", *_TASK, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"))

    def hint(self, environ: Mapping[str, str]) -> str:
        tasks = _room(environ)
        if tasks == "1" or not _job(environ) or started_by_torchrun(environ) or is_worker(environ):
            return ""
        return f"the job has room for {tasks} tasks, and this process was not started by srun: it is one process"


def _why_not(environ: Mapping[str, str]) -> str:
    """Why srun did not start this process, or did not start it for this; empty where it did."""
    if not _job(environ):
        return "SLURM_JOB_ID is not set"
    if started_by_torchrun(environ):
        return INSIDE
    if is_worker(environ):
        return "Ray started this process inside of the job"
    for inner in ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID"):
        if environ.get(inner):
            return f"{inner} is set: mpirun started this process inside of the job"
    if not any(environ.get(name) for name in _STEP):
        tasks = _room(environ)
        hint = "" if tasks == "1" else f", and the job has room for {tasks}: start the command with srun"
        return f"no step of srun's: this is the batch script, or a shell in the allocation; one process{hint}"
    if _step(environ) >= _SPECIAL_STEPS:
        return (
            f"SLURM_STEP_ID={environ.get('SLURM_STEP_ID')} is that of an interactive session; srun starts tasks in it"
        )
    name = environ.get("SLURM_JOB_NAME", "")
    if _step(environ) == 0 and environ.get("SLURM_PTY_PORT") and name != "interactive":
        return "SLURM_PTY_PORT is set in the job's first step: a shell of srun --pty"
    if name in _SHELLS and _tasks(environ) == 1:
        return f"SLURM_JOB_NAME={name} with one task: a session to type in"
    return ""


def _job(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""


def _room(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_NTASKS") or environ.get("SLURM_TASKS_PER_NODE") or "1"


def _tasks(environ: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return number(environ, name)


def _step(environ: Mapping[str, str]) -> int:
    name = "SLURM_STEP_ID" if environ.get("SLURM_STEP_ID") else "SLURM_STEPID"
    return number(environ, name, default=0)


def _first(environ: Mapping[str, str], *names: str, default: str | None = None) -> str:
    value = next((environ[name] for name in names if environ.get(name)), default)
    if value is None:
        raise ConfigurationError(f"srun started this process, but none of {', '.join(names)} is set.")
    return value
