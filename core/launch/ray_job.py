"""Ray as a submitter: a job of its job server, whose entrypoint starts Trivet with ``--launcher ray``."""

from __future__ import annotations

import json
import os
import shlex
from typing import Any

from ..errors import ConfigurationError, LaunchError
from .submitter import Job, Submitter


class RayJob(Submitter):
    """The arguments of Ray's ``JobSubmissionClient.submit_job``, printed as JSON, which its REST interface takes too.

    ``address`` is that of the job server, else ``RAY_ADDRESS``; ``working_dir`` is what the job finds in its current
    directory; ``runtime_env`` is more of Ray's runtime environment, as JSON.
    """

    options = frozenset({"address", "working_dir", "runtime_env"})

    def render(self, job: Job) -> str:
        return json.dumps(self._arguments(job), indent=2) + "\n"

    def submit(self, job: Job) -> str:
        arguments = self._arguments(job)
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise LaunchError(
                "Ray is not installed here, so the job cannot be handed over. Install ray[default], or print the job "
                "with --dry-run and post it to the job server's /api/jobs/."
            ) from error
        address = job.text("address") or os.environ.get("RAY_ADDRESS") or "http://127.0.0.1:8265"
        try:
            return str(JobSubmissionClient(address).submit_job(**arguments))
        except (ConnectionError, RuntimeError) as error:
            raise LaunchError(f"the job server at {address} did not take the job: {error}") from error

    def _arguments(self, job: Job) -> dict[str, Any]:
        if job.time is not None or job.memory is not None:
            raise ConfigurationError("--time and --memory: Ray's job server knows neither. Leave them out.")
        words = [*job.program, *job.command]
        for flag, value in (("launcher", "ray"), ("num_nodes", str(job.nodes)), ("devices", str(job.devices))):
            if not any(word == f"--{flag}" or word.startswith(f"--{flag}=") for word in words):
                words += [f"--{flag}", value]
        runtime = {"working_dir": job.text("working_dir") or "."}
        if text := job.text("runtime_env"):
            try:
                runtime |= json.loads(text)
            except (TypeError, ValueError):
                raise ConfigurationError(f"--runtime-env {text!r}: expected a JSON object.") from None
        runtime |= {"env_vars": {**job.variables(), **runtime.get("env_vars", {})}}  # type: ignore[dict-item]
        if not runtime["env_vars"]:
            del runtime["env_vars"]
        return {"entrypoint": shlex.join(words), "submission_id": job.name, "runtime_env": runtime}
