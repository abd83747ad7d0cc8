"""MPI: processes of Open MPI's mpirun, and of launchers that speak PMI (MPICH, Intel MPI, Cray)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ConfigurationError
from . import nodelist
from .environment import Environment
from .variables import INSIDE, address, missing, number, place, port, said, started_by_torchrun
from .world import World

_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_PMI = ("PMI_RANK", "PMI_SIZE")
_LOCAL_RANK = ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
_JOB = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_ess_jobid",
    "PMI_JOBID",
    "PALS_APID",
    "SLURM_JOB_ID",
)


class OpenMPI(Environment):
    """mpirun of Open MPI. Its variables are documented under "Environment variables set for MPI applications"."""

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if _why_not(environ, _OPEN_MPI):
            return None
        missing(environ, _OPEN_MPI, "mpirun")
        rank, size, local_rank, local_size = (number(environ, name) for name in _OPEN_MPI)
        return _meeting(environ, place(rank, size, local_rank, local_size, "openmpi"))

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        why = _why_not(environ, _OPEN_MPI)
        return (why,) if why else said(environ, _OPEN_MPI)


class PMI(Environment):
    """mpiexec of MPICH, Intel MPI or a Cray, by the variables of the process management interface.

    srun sets them too, for its own tasks. Those are SLURM's.
    """

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if self._why_not(environ):
            return None
        if not environ.get("PMI_RANK"):
            raise ConfigurationError(
                f"PMIX_RANK={environ['PMIX_RANK']} says that this is one of several processes, but not of how many. "
                "Start with srun, with mpirun, or with torchrun, or set TRIVET_ENVIRONMENT=none for one process."
            )
        missing(environ, _PMI, "mpiexec")
        rank, size = (number(environ, name) for name in _PMI)
        names = [next((one for one in several if environ.get(one)), "") for several in (_LOCAL_RANK, _LOCAL_SIZE)]
        if size == 1:
            return _meeting(environ, place(0, 1, 0, 1, "pmi"))
        if not all(names):
            raise ConfigurationError(
                f"mpiexec started this process as {rank} of {size}, but none of {', '.join(_LOCAL_RANK)} and none of "
                f"{', '.join(_LOCAL_SIZE)} says which device is its. Start with torchrun or srun, or export them."
            )
        local_rank, local_size = (number(environ, name) for name in names)
        return _meeting(environ, place(rank, size, local_rank, local_size, "pmi"))

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        why = self._why_not(environ)
        return (why,) if why else said(environ, ("PMIX_RANK", *_PMI, *_LOCAL_RANK, *_LOCAL_SIZE))

    def _why_not(self, environ: Mapping[str, str]) -> str:
        if environ.get("OMPI_COMM_WORLD_RANK"):
            return "OMPI_COMM_WORLD_RANK is set: Open MPI's"
        if why := _why_not(environ, (*_PMI, "PMIX_RANK")):
            return why
        if environ.get("SLURM_STEP_ID") and not environ.get("MPI_LOCALRANKID"):
            return "SLURM_STEP_ID is set: srun's own"
        return ""


def _why_not(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    if not any(environ.get(name) for name in names):
        return f"none of {', '.join(names)} is set"
    if started_by_torchrun(environ):
        return INSIDE
    if environ.get("JSM_NAMESPACE_RANK"):
        return "JSM_NAMESPACE_RANK is set: jsrun's, of LSF"
    return ""


def _meeting(environ: Mapping[str, str], world: World) -> World:
    """The world with an address: MPI's launchers tell none, unless all processes are on this machine."""
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return world
    jobs = [environ[name] for name in _JOB if environ.get(name)]
    nodes = environ.get("SLURM_JOB_NODELIST")
    if jobs and (world.num_nodes == 1 or nodes):
        host = "127.0.0.1" if world.num_nodes == 1 else nodelist.hosts(nodes or "")[0]
        return replace(world, address=address(environ, host, port(jobs[0])))
    raise ConfigurationError(
        f"{world.source} started {world.world_size} processes on {world.num_nodes} node(s), and nothing says where "
        "they meet. Hand MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there, to all of them: "
        "`mpirun -x MASTER_ADDR=host1 -x MASTER_PORT=29500 ...` (Open MPI), `mpiexec -genv MASTER_ADDR host1 ...`."
    )
