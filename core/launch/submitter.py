"""Submitter: writes a job for a cluster that starts exactly one command, and hands it to the cluster's own program."""

from __future__ import annotations

import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import ConfigurationError, LaunchError
from . import profiles

_PLACES = (86_400, 3600, 60, 1)


@dataclass(frozen=True)
class Job:
    """What is to run, and with what.

    ``program`` starts it (``("trivet",)`` or ``("python", "train.py")``), ``command`` is the rest of the command line.
    ``devices`` counts processes on each of ``nodes``. ``cpus`` are for each process, ``memory`` and ``gpus`` for each
    node. ``options`` are the flags of `Submitter.options`, as the user gave them; those that were not given are not
    there.
    """

    program: tuple[str, ...]
    command: tuple[str, ...]
    name: str
    nodes: int = 1
    devices: int = 1
    cpus: int | None = None
    gpus: int = 0
    memory: str | None = None
    time: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    comm_profile: str | None = None
    options: Mapping[str, str | bool | list[str]] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """The user's variables and, below them, those of the communication profile."""
        found = {}
        if self.comm_profile not in (None, "auto"):  # which is settled where the devices are
            for one in profiles.settings(str(self.comm_profile), {}, 1, cores=self.cpus or 1):
                if one.variable.name != profiles.AFFINITY and ("{threads}" not in one.variable.value or self.cpus):
                    found[one.variable.name] = one.value
        return {**found, **self.environ}

    def text(self, option: str) -> str:
        """An option with a value, or an empty string."""
        value = self.options.get(option, "")
        return value if isinstance(value, str) else ""

    def lines(self, option: str) -> list[str]:
        """An option that may be given several times."""
        value = self.options.get(option, [])
        return value if isinstance(value, list) else []

    def under_torchrun(self) -> list[str]:
        """The words after ``torchrun``: a script, or Trivet as a module."""
        return [*(self.program[1:] or ("-m", *self.program)), *self.command]


class Submitter(ABC):
    """Writes jobs for one kind of cluster. Selected with ``trivet submit --to NAME``; entry points: trivet.submitters.

    Its constructor takes no arguments. Its module imports neither torch nor the cluster's own package.
    """

    interface: ClassVar[int] = 1

    options: ClassVar[frozenset[str]] = frozenset()
    """Names of the flags that mean something here beyond those that every job has; others are refused."""

    @abstractmethod
    def render(self, job: Job) -> str:
        """What is handed over: a script, a manifest. Pure. Raises ConfigurationError for what cannot be said in it."""

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Hand it over; return what the cluster answered. Raises LaunchError where that is not possible."""


def call(words: list[str], text: str) -> str:
    """Run a cluster's program with ``text`` as its input, and return what it printed."""
    if shutil.which(words[0]) is None:
        raise LaunchError(
            f"{words[0]!r} is not installed here, so the job cannot be handed over. Run this where it is, or print the "
            "job with --dry-run and hand it over yourself."
        )
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LaunchError(f"`{' '.join(words)}` refused the job (exit code {done.returncode}): {said}")
    return done.stdout.strip()


def seconds(time: str) -> int:
    """A time as SLURM writes it: minutes, ``MM:SS``, ``HH:MM:SS``, or with days ``D-HH`` to ``D-HH:MM:SS``."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", time):
        raise ConfigurationError(f"--time {time!r}: expected minutes, HH:MM:SS or D-HH:MM:SS.")
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    places = _PLACES[1:] if dash or len(parts) == 3 else _PLACES[2:]
    found = int(days or 0) * _PLACES[0] + sum(part * place for part, place in zip(parts, places, strict=False))
    if found < 1:
        raise ConfigurationError(f"--time {time!r} is no time at all.")
    return found
