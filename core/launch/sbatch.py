"""SLURM as a submitter: a batch script whose tasks srun starts, one for each process."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from ..errors import ConfigurationError
from .submitter import Job, Submitter, call, seconds

_SIGNAL_S = 90
_WARNED = 138
"""The exit code after SIGUSR1. A run that was cancelled got SIGTERM, ends with 143, and is not to come back."""


class Sbatch(Submitter):
    """Writes a batch script and hands it to ``sbatch``."""

    options = frozenset({"queue", "account", "image", "requeue", "signal", "output", "sbatch", "setup"})

    def render(self, job: Job) -> str:
        """A script for ``sbatch``. With ``requeue`` the run saves a checkpoint before its time is over, goes back into
        the queue, and goes on from there."""
        requeues = bool(job.options.get("requeue"))
        command = list(job.command)
        if requeues and command[0] == "fit" and not any(re.match(r"--(resume|ckpt_path)\b", word) for word in command):
            command += ["--resume", "auto"]
        srun = ["srun"]
        if job.cpus:
            srun.append(f"--cpus-per-task={job.cpus}")  # which srun does not take over from sbatch
        if image := job.text("image"):
            srun.append(f"--container-image={image}")
        start = shlex.join([*srun, *job.program, *command])
        lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _directives(job)), "set -euo pipefail", ""]
        lines += job.lines("setup")
        for name, value in job.variables().items():
            if name in job.environ:
                lines.append(f"export {name}={shlex.quote(value)}")
            else:  # of the profile, above which stands what is set on the cluster
                lines.append(f'export {name}="${{{name}:-{value}}}"')
        if not requeues:
            return "\n".join([*lines, start, ""])
        lines += ["code=0", f"{start} || code=$?"]
        lines += [f'if [ "$code" -eq {_WARNED} ]; then  # time is nearly over; a checkpoint was saved']
        lines += ['    scontrol requeue "$SLURM_JOB_ID"', "fi", 'exit "$code"', ""]
        return "\n".join(lines)

    def submit(self, job: Job) -> str:
        return call(["sbatch"], self.render(job))


def _directives(job: Job) -> Iterator[str]:
    if job.time is not None:
        seconds(job.time)
    signal = job.text("signal") or (str(_SIGNAL_S) if job.options.get("requeue") else "")
    if signal and not signal.isdecimal():
        raise ConfigurationError(f"--signal {signal!r}: expected the seconds before the end, such as 90.")
    given = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.devices),
        "cpus-per-task": str(job.cpus or ""),
        "gres": f"gpu:{job.gpus}" if job.gpus else "",
        "mem": job.memory or "",
        "time": job.time or "",
        "partition": job.text("queue"),
        "account": job.text("account"),
        "output": job.text("output"),
        "signal": f"USR1@{signal}" if signal else "",
    }
    for name, value in given.items():
        if "\n" in value or '"' in value:
            raise ConfigurationError(f"{name} {value!r} cannot stand in a line of #SBATCH.")
        if value:
            yield f'--{name}="{value}"' if re.search(r"[^\w@%+:.,/=-]", value) else f"--{name}={value}"
    if job.options.get("requeue"):
        yield "--requeue"
        yield "--open-mode=append"
    for line in job.lines("sbatch"):
        if "\n" in line or not line.startswith("-"):
            raise ConfigurationError(
                f"--sbatch {line!r}: expected one option of sbatch's, such as '--constraint=a100'."
            )
        yield line
