"""Kubernetes as a submitter: manifests of Kubeflow's TrainJob and PyTorchJob, whose pods run torchrun."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ConfigurationError
from .submitter import Job, Submitter, call, seconds

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")  # pods and services get longer names from it
_KUEUE = "kueue.x-k8s.io/queue-name"


class TrainJob(Submitter):
    """A TrainJob, ``trainer.kubeflow.org/v1alpha1``, for Kubeflow's Trainer (v2).

    Its runtime has torch's policy, which sets torchrun's options in each pod. ``runtime`` names another one than
    ``torch-distributed``.
    """

    options = frozenset({"queue", "image", "namespace", "runtime"})

    def render(self, job: Job) -> str:
        trainer: dict[str, Any] = {"numNodes": job.nodes, "numProcPerNode": job.devices}
        if image := job.text("image"):
            trainer["image"] = image
        trainer |= {"command": ["torchrun"], "args": job.under_torchrun()}
        if variables := _variables(job):
            trainer["env"] = variables
        if resources := _resources(job):
            trainer["resourcesPerNode"] = resources
        spec: dict[str, Any] = {"runtimeRef": {"name": job.text("runtime") or "torch-distributed"}, "trainer": trainer}
        if job.time is not None:
            spec["activeDeadlineSeconds"] = seconds(job.time)
        return _manifest("trainer.kubeflow.org/v1alpha1", "TrainJob", job, spec)

    def submit(self, job: Job) -> str:
        return _create(self.render(job))


class PyTorchJob(Submitter):
    """A PyTorchJob, ``kubeflow.org/v1``, for the training operator (v1)."""

    options = frozenset({"queue", "image", "namespace"})

    def render(self, job: Job) -> str:
        if not job.text("image"):
            raise ConfigurationError("a PyTorchJob names the image of its container. Add --image NAME.")
        container: dict[str, Any] = {
            "name": "pytorch",  # the operator looks for a container of this name
            "image": job.text("image"),
            "command": ["torchrun"],
            "args": job.under_torchrun(),
        }
        if variables := _variables(job):
            container["env"] = variables
        if resources := _resources(job):
            container["resources"] = resources

        def replicas(count: int) -> dict[str, Any]:
            template = {"spec": {"containers": [container]}}
            return {"replicas": count, "restartPolicy": "OnFailure", "template": template}

        specs = {"Master": replicas(1)} | ({"Worker": replicas(job.nodes - 1)} if job.nodes > 1 else {})
        policy: dict[str, Any] = {"cleanPodPolicy": "None"}
        if job.time is not None:
            policy["activeDeadlineSeconds"] = seconds(job.time)
        spec = {"nprocPerNode": str(job.devices), "runPolicy": policy, "pytorchReplicaSpecs": specs}
        return _manifest("kubeflow.org/v1", "PyTorchJob", job, spec)

    def submit(self, job: Job) -> str:
        return _create(self.render(job))


def _manifest(version: str, kind: str, job: Job, spec: dict[str, Any]) -> str:
    import yaml  # type: ignore[import-untyped]

    if not _NAME.fullmatch(job.name):
        raise ConfigurationError(
            f"--name {job.name!r}: Kubernetes expects at most 50 lower-case letters, digits and dashes, a letter first."
        )

    class Plain(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    metadata: dict[str, Any] = {"name": job.name}
    if namespace := job.text("namespace"):
        metadata["namespace"] = namespace
    if queue := job.text("queue"):
        metadata["labels"] = {_KUEUE: queue}
    found = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
    return str(yaml.dump(found, Dumper=Plain, sort_keys=False, allow_unicode=True, width=1000))


def _variables(job: Job) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in job.variables().items()]


def _resources(job: Job) -> dict[str, Any]:
    found: dict[str, str | int] = {}
    if job.cpus:
        found["cpu"] = str(job.cpus * job.devices)
    if job.memory:
        found["memory"] = job.memory
    if job.gpus:
        found["nvidia.com/gpu"] = str(job.gpus)
    return {"requests": dict(found), "limits": dict(found)} if found else {}


def _create(manifest: str) -> str:
    return call(["kubectl", "create", "-f", "-"], manifest)  # apply would call a second run of that name unchanged
