"""SageMaker: one of the hosts of a training job, on each of which it starts the user's script once."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..errors import ConfigurationError
from .environment import Environment, Node
from .variables import INSIDE, address, missing, number, port, said, started_by_torchrun
from .world import World

_HOST = ("SM_HOSTS", "SM_CURRENT_HOST")


class SageMaker(Environment):
    """The variables of the SageMaker training toolkit. They tell of hosts; processes are for others to start."""

    def detect(self, environ: Mapping[str, str]) -> World | None:
        return None

    def node(self, environ: Mapping[str, str]) -> Node | None:
        if _why_not(environ):
            return None
        missing(environ, _HOST, "SageMaker")
        try:
            hosts = sorted(str(host) for host in json.loads(environ["SM_HOSTS"]))
        except (TypeError, ValueError):
            raise ConfigurationError(
                f'SM_HOSTS is {environ["SM_HOSTS"]!r}; expected a JSON list such as \'["algo-1", "algo-2"]\'.'
            ) from None
        if environ["SM_CURRENT_HOST"] not in hosts:
            raise ConfigurationError(f"SM_CURRENT_HOST={environ['SM_CURRENT_HOST']} is none of SM_HOSTS={hosts}.")
        where = address(environ, hosts[0], port(environ.get("TRAINING_JOB_NAME", "sagemaker")))
        gpus = number(environ, "SM_NUM_GPUS", default=0)
        return Node(hosts.index(environ["SM_CURRENT_HOST"]), len(hosts), where, gpus or None)

    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        why = _why_not(environ)
        return (why,) if why else said(environ, (*_HOST, "SM_NUM_GPUS"))


def _why_not(environ: Mapping[str, str]) -> str:
    if not any(environ.get(name) for name in _HOST):
        return f"none of {', '.join(_HOST)} is set"
    if started_by_torchrun(environ):
        return INSIDE
    if environ.get("OMPI_COMM_WORLD_RANK"):
        return "OMPI_COMM_WORLD_RANK is set: mpirun started this process inside of the job"
    return ""
