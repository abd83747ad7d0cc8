"""Kubeflow: pods of a PyTorchJob (v1) and of a TrainJob (v2). The operators start one process in each pod."""

from __future__ import annotations

from collections.abc import Mapping

from .environment import Environment, Node
from .variables import INSIDE, missing, number, said, started_by_torchrun
from .world import World

_ELASTIC = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_POD = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
_CLUSTER = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_PORT", "PET_NPROC_PER_NODE", "PET_NNODES")


class PyTorchJob(Environment):
    """A pod of a PyTorchJob. ``RANK`` is that of the pod, which is why torchrun's ``LOCAL_RANK`` is not there.

    Where there is one process to a pod (``PET_NPROC_PER_NODE`` is 1, or not set, as by older operators), that is the
    world. Otherwise the variables say which node this is, and Trivet's launcher, or torchrun, starts its processes.
    """

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if _not_pytorchjob(environ) or environ.get("PET_NPROC_PER_NODE", "1") != "1":
            return None
        missing(environ, _POD, "the PyTorchJob")
        return _one_each(number(environ, "RANK"), number(environ, "WORLD_SIZE"), "pytorchjob", "")

    def node(self, environ: Mapping[str, str]) -> Node | None:
        if _not_pytorchjob(environ) or environ.get("PET_NPROC_PER_NODE", "1") == "1":
            return None
        missing(environ, _POD, "the PyTorchJob")
        processes = _processes(environ)
        total = number(environ, "WORLD_SIZE")
        # newer operators count processes in WORLD_SIZE, older ones pods; PET_NNODES counts pods in both
        nodes = number(environ, "PET_NNODES", default=total // (processes or 1) or 1)
        where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        return Node(number(environ, "RANK"), nodes, where, processes)

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        why = _not_pytorchjob(environ)
        return (why,) if why else said(environ, (*_POD, *_ELASTIC))


class TrainJob(Environment):
    """A pod of a TrainJob, whose ``PET_`` variables are torchrun's options; likewise."""

    def detect(self, environ: Mapping[str, str]) -> World | None:
        if _not_trainjob(environ) or environ["PET_NPROC_PER_NODE"] != "1":
            return None
        where = f"{environ['PET_MASTER_ADDR']}:{environ['PET_MASTER_PORT']}"
        return _one_each(number(environ, "PET_NODE_RANK"), number(environ, "PET_NNODES"), "trainjob", where)

    def node(self, environ: Mapping[str, str]) -> Node | None:
        if _not_trainjob(environ) or environ["PET_NPROC_PER_NODE"] == "1":
            return None
        where = f"{environ['PET_MASTER_ADDR']}:{environ['PET_MASTER_PORT']}"
        return Node(number(environ, "PET_NODE_RANK"), number(environ, "PET_NNODES"), where, _processes(environ))

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        why = _not_trainjob(environ)
        return (why,) if why else said(environ, _ELASTIC)


def is_pod_of_pytorchjob(environ: Mapping[str, str]) -> bool:
    """Whether ``RANK`` and ``WORLD_SIZE`` count pods here, not processes."""
    launched = any(environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    both = environ.get("RANK") and environ.get("WORLD_SIZE")
    return bool(both and not launched and any(environ.get(name) for name in _CLUSTER))


def _not_pytorchjob(environ: Mapping[str, str]) -> str:
    if started_by_torchrun(environ):
        return INSIDE
    if not is_pod_of_pytorchjob(environ):
        return "not a pod with RANK and WORLD_SIZE, but without LOCAL_RANK"
    return _elastic(environ)


def _not_trainjob(environ: Mapping[str, str]) -> str:
    if started_by_torchrun(environ):
        return INSIDE
    if environ.get("RANK") or any(not environ.get(name) for name in _ELASTIC):
        lacking = [name for name in _ELASTIC if not environ.get(name)]
        return f"{', '.join(lacking)} not set" if lacking else "RANK is set: a PyTorchJob's"
    return _elastic(environ)


def _elastic(environ: Mapping[str, str]) -> str:
    nodes = environ.get("PET_NNODES", "")
    return f"PET_NNODES={nodes} is a range: torchrun finds out how many there are" if ":" in nodes else ""


def _processes(environ: Mapping[str, str]) -> int | None:
    text = environ["PET_NPROC_PER_NODE"]
    return int(text) if text.isdecimal() else None  # auto, cpu, gpu


def _one_each(rank: int, size: int, source: str, where: str) -> World:
    return World(rank, size, 0, 1, rank, size, source, where)
