"""Communication profiles: named sets of environment variables by device and network, kept in ``profiles.toml``."""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

AFFINITY = "TRIVET_CPU_AFFINITY"
"""``own``: a worker of the local launcher binds itself to its share of the cores. Any other value leaves it alone."""

_FABRICS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Variable:
    """One variable of a profile. ``before_torch``: torch reads it while it is loaded, so it has to be there before."""

    name: str
    value: str
    why: str
    source: str
    before_torch: bool = False


@dataclass(frozen=True)
class Profile:
    """A set of variables for a device and a network. ``proven`` says where it was run; empty where it never was."""

    name: str
    about: str
    device: str
    network: str
    variables: tuple[Variable, ...]
    proven: str = ""


@dataclass(frozen=True)
class Setting:
    """What a profile does to one variable here. ``users`` is the value that the user has set, which stays."""

    variable: Variable
    value: str
    users: str | None


@functools.cache
def profiles() -> Mapping[str, Profile]:
    """Every profile by its name."""
    text = resources.files(__package__).joinpath("profiles.toml").read_text(encoding="utf-8")
    return {name: _profile(name, values) for name, values in tomllib.loads(text).items()}


def _profile(name: str, values: dict[str, Any]) -> Profile:
    variables = tuple(Variable(**one) for one in values.pop("variables"))
    return Profile(name=name, variables=variables, **values)


def find(name: str) -> Profile:
    """The profile of that name. Raises ConfigurationError with the nearest name."""
    known = profiles()
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(f"no communication profile is named {name!r}.{guess} Known: auto, {', '.join(known)}.")
    return known[name]


def choose(device_type: str, num_nodes: int, fabrics: Iterable[str]) -> str | None:
    """The name that ``auto`` stands for; None where no profile is for that device. ``fabrics``: see `installed`."""
    if device_type == "cpu":
        return "cpu-gloo"
    if device_type != "cuda":
        return None
    names = list(fabrics)
    if num_nodes == 1:
        return "cuda-single-node"
    if any(name.startswith(("efa", "rdmap")) for name in names):  # what AWS's driver calls its devices
        return "cuda-efa"
    return "cuda-infiniband" if names else "cuda-ethernet"


def installed() -> list[str]:
    """Names of this machine's RDMA devices, such as ``mlx5_0``."""
    return sorted(entry.name for entry in _FABRICS.iterdir()) if _FABRICS.is_dir() else []


def resolve(name: str, device_type: str, num_nodes: int, *, started: bool) -> tuple[str | None, list[str]]:
    """The profile that is meant, and sentences for the Plan. Raises ConfigurationError for one of another device.

    ``started``: the processes are there already, so that variables which torch reads while it is loaded come too late.
    """
    notes = []
    if name == "auto":
        chosen = choose(device_type, num_nodes, installed())
        notes.append(f"comm_profile auto: {chosen or f'none, since there is none for {device_type}'}")
        if chosen is None:
            return None, notes
        name = chosen
    profile = find(name)
    if profile.device != device_type:
        fitting = [one.name for one in profiles().values() if one.device == device_type]
        raise ConfigurationError(
            f"comm_profile={name!r} is for {profile.device}, and this run uses {device_type}. "
            f"Expected one of {', '.join(['auto', *fitting])}, or none."
        )
    if not profile.proven:
        notes.append(f"comm_profile {name} is unproven: it was never run on hardware of its kind")
    late = [one.name for one in profile.variables if one.before_torch and started and not os.environ.get(one.name)]
    if late:
        notes.append(f"comm_profile {name}: {', '.join(late)} can only be set by who starts the processes")
    return name, notes


def settings(name: str, environ: Mapping[str, str], processes: int, *, cores: int | None = None) -> list[Setting]:
    """What a profile would set for each of ``processes`` on this machine, beside what the user has set."""
    threads = str(max((len(own_cores()) if cores is None else cores) // max(processes, 1), 1))
    return [
        Setting(one, one.value.format(threads=threads), environ.get(one.name) or None) for one in find(name).variables
    ]


def values(name: str | None, environ: Mapping[str, str], processes: int) -> dict[str, str]:
    """The variables that a launcher gives its workers, without those that the user has set."""
    found = settings(name, environ, processes) if name else []
    return {one.variable.name: one.value for one in found if one.users is None}


def apply(name: str | None, environ: MutableMapping[str, str], processes: int) -> None:
    """Set, in a process where torch is loaded and nothing is connected yet, what still has an effect."""
    for one in settings(name, environ, processes) if name else []:
        if one.users is None and not one.variable.before_torch:
            environ[one.variable.name] = one.value


def own_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share(cores: list[int], local_rank: int, processes: int) -> list[int]:
    """One process's part of the cores: as many neighbours as each other's; all where there are fewer cores."""
    count = len(cores) // processes
    return cores[local_rank * count : (local_rank + 1) * count] if count else cores


def bind(environ: Mapping[str, str], local_rank: int, processes: int) -> None:
    """Bind this process to its share of the cores, where `AFFINITY` asks for it; before torch is loaded."""
    if environ.get(AFFINITY) == "own" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, share(own_cores(), local_rank, processes))
