"""One combination of module, plugins and request as facts, and everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING

from . import node_flags
from .launch.environment import Node
from .launch.world import World
from .node_flags import NodeFlags
from .registry import Selected, label

if TYPE_CHECKING:
    from .plugins import Choice, Clip, Policy

KINDS = ("module", "strategy", "accelerator", "precision")

# What the fields of a request are called on the command line, where that differs.
FLAGS = {"accumulate": "accumulate_grad_batches", "clip": "gradient_clip_val"}

# The capability names that Trivet's own plugins use, by the kind that offers them. Others may coin more.
KNOWN = {
    "strategy": frozenset(
        {
            "several_processes",
            "loss_scaling",
            "accumulation",
            "clipping",
            "manual_optimization",
            "skip_samples",
            "unused_parameters",  # ranks may use different parameters in one update
            "user_optimizer",  # what steps is the optimizer that the user made
            "lazy_devices",  # trains where nothing is computed before the update ends
            "replaced_layers",  # a precision may put layers of its own in place of the user's
            "whole_parameters",  # each process holds all of every parameter
            "fsdp_extensions",  # what is sent of a parameter is what the tensor itself says, as torch's FSDP2 has it
        }
    ),
    "accelerator": frozenset(
        {
            "collectives",  # its backend connects several processes
            "shared_devices",  # more processes than devices are fine
            "device_ids",  # `device` may be asked for any number below `device_count`
            "spmd",  # its compiler lays one process's tensors out over several devices
            "dtype:float32",
            "dtype:float64",
            "dtype:bfloat16",
            "dtype:float16",
            "autocast:bfloat16",
            "autocast:float16",
            "float8",  # tensors in float8, and products of them, emulated or not
            "collectives:float8",  # its backend sends float8
            "native_kernels",  # runs operators that libraries bring compiled
            "kernels:cuda",  # among them those that are written in CUDA alone
        }
    ),
    "precision": frozenset[str](),
    "module": frozenset[str](),
    "launcher": frozenset({"several_nodes", "node_by_node"}),
}


@dataclass(frozen=True)
class Party:
    """What one side says of itself. ``needs`` are capability names by the kind that should offer them.

    ``reasons``: what it says of names that are missing, on either side. ``available``, ``reason``, ``device_count`` and
    ``device_type`` mean something for accelerators, ``mesh_dims`` and ``refuses`` for strategies, ``policy`` for
    precisions.
    """

    kind: str
    name: str
    distribution: str = "local"
    version: str = ""
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    offers: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    available: bool = True
    reason: str = ""
    device_count: int = 1
    mesh_dims: Callable[[int], Mapping[str, int]] | None = None
    refuses: Callable[[Choice], Iterable[tuple[str, str]]] | None = None
    device_type: str = ""
    policy: Policy | None = None

    def __str__(self) -> str:
        return label(self.kind, self.name, self.distribution, self.version)


@dataclass(frozen=True)
class Request:
    """What the user asked for beside the plugins. ``devices`` counts processes per node.

    ``world`` is what an environment says, where there is one: it overrules nothing, but has to agree. So has ``node``,
    where an environment started one process on each machine; else it is what the flags say, which are in ``place``.
    ``launcher`` is what starts the processes, where one was
    asked for or several are wanted. ``comm_profile`` is the name of one that exists. ``needs`` are further capability
    names that this run wants, by kind. ``notes`` go into the Plan.
    """

    devices: int = 1
    device_ids: tuple[int, ...] | None = None
    num_nodes: int = 1
    world: World | None = None
    node: Node | None = None
    place: NodeFlags = field(default_factory=NodeFlags)
    launcher: Party | None = None
    manual: bool = False
    on_skip: str | None = None
    accumulate: int | None = 1
    global_batch_size: int | None = None
    clip: Clip | None = None
    deterministic: bool = False
    returns_weights: bool = True
    comm_profile: str | None = None
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """The number of processes, if the request is granted."""
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Combination:
    """The four sides of a negotiation; ``module`` is None as long as it is not known."""

    module: Party | None
    strategy: Party
    accelerator: Party
    precision: Party
    request: Request


@dataclass(frozen=True)
class Problem:
    """A conflict without its remedy. ``axes`` are what to change first: a kind, or a field of the request."""

    parties: tuple[str, ...]
    reason: str
    axes: tuple[str, ...]


def party(selected: Selected) -> Party:
    """The facts of a plugin. Asks it only what may be asked in the launching process."""
    plugin = selected.plugin
    needs = None if selected.kind == "launcher" else plugin.needs
    facts: dict[str, object] = {} if needs is None else {"reasons": dict(plugin.reasons)}
    if selected.kind == "accelerator":
        facts["device_type"] = plugin.device_type
        facts["available"] = available = plugin.is_available()
        facts["reason"] = "" if available else plugin.unavailable_reason()
        facts["device_count"] = plugin.device_count() if available else 0
    if selected.kind == "strategy":
        facts["mesh_dims"], facts["refuses"] = plugin.mesh_dims, plugin.refuses
    if selected.kind == "precision":
        facts["policy"] = plugin.policy
    return Party(
        selected.kind,
        selected.name,
        selected.distribution,
        selected.version,
        needs={} if needs is None else {kind: getattr(needs, kind) for kind in KINDS},
        offers=plugin.offers,
        **facts,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Demand:
    """Capability names that somebody, a plugin or the request, wants one side to offer."""

    wanting: Party | str
    offering: Party
    names: frozenset[str]
    axes: tuple[str, ...]  # what to change where one is missing

    @property
    def missing(self) -> frozenset[str]:
        """Those that are not offered."""
        return self.names - self.offering.offers


def problems(combination: Combination) -> list[Problem]:
    """Everything that keeps a combination from running; an empty list if nothing does. Pure."""
    return [
        *_missing_capabilities(combination),
        *_accelerator_problems(combination.accelerator, combination.request),
        *(Problem(*found) for found in node_flags.problems(combination.request)),
        *_mesh_problems(combination.strategy, combination.request),
        *_refusals(combination),
    ]


def demands(combination: Combination) -> Iterator[Demand]:
    """Who wants what of whom: the plugins of one another, then what was asked for beside them. Pure."""
    sides = [side for kind in KINDS if (side := getattr(combination, kind)) is not None]
    for wanting in sides:
        for offering in sides:
            if names := wanting.needs.get(offering.kind, frozenset()):
                yield Demand(wanting, offering, names, (offering.kind, wanting.kind))
    request, strategy = combination.request, combination.strategy
    wishes = [
        (request.world_size > 1, f"{request.world_size} processes", "several_processes", ("strategy", "devices")),
        (request.manual, str(combination.module or "manual optimization"), "manual_optimization", ("strategy",)),
        (request.on_skip == "samples", "--on_skip samples", "skip_samples", ("strategy", "on_skip")),
        (
            (request.accumulate or 1) > 1,
            f"--accumulate_grad_batches {request.accumulate}"
            if request.global_batch_size is None
            else f"--global_batch_size {request.global_batch_size} ({request.accumulate} micro-batches per process)",
            "accumulation",
            ("strategy", "accumulate"),
        ),
        (request.clip is not None, "--gradient_clip_val", "clipping", ("strategy", "clip")),
    ]
    for wished, who, name, axes in wishes:
        if wished:
            yield Demand(who, strategy, frozenset({name}), axes)
    for kind, names in request.needs.items():
        side = getattr(combination, kind)
        if side is not None:
            yield Demand("this run", side, names, (kind,))


def _missing_capabilities(combination: Combination) -> Iterator[Problem]:
    for demand in demands(combination):
        if demand.missing:
            yield _missing(demand)


def nearest(name: str, names: Iterable[str]) -> str:
    """The capability name that ``name`` may be a misspelling of, or an empty string."""
    return next(iter(get_close_matches(name, sorted(names), n=1, cutoff=0.8)), "")


def _missing(demand: Demand) -> Problem:
    wanting, offering, missing = demand.wanting, demand.offering, demand.missing
    reason = f"the first wants {', '.join(map(repr, sorted(missing)))}, which the second does not offer."
    known = KNOWN[offering.kind]
    told = [*offering.reasons.items(), *(() if isinstance(wanting, str) else wanting.reasons.items())]
    reason += "".join(f" {sentence}" for name, sentence in told if name in missing)
    for name in sorted(missing - known):
        if near := nearest(name, known | offering.offers):
            reason += f" No {offering.kind} of Trivet's offers anything named {name!r}; did its author mean {near!r}?"
    for name in sorted(offering.offers - known):
        if (near := nearest(name, known)) in missing:
            reason += f" It offers {name!r}; did its author mean {near!r}?"
    return Problem((str(wanting), str(offering)), reason, demand.axes)


def _accelerator_problems(accelerator: Party, request: Request) -> Iterator[Problem]:
    who = str(accelerator)
    if not accelerator.available:
        yield Problem((who, "this machine"), f"it is not available: {accelerator.reason}.", ("accelerator",))
        return
    count, ids = accelerator.device_count, request.device_ids
    if ids is not None:
        flag = f"--devices {','.join(map(str, ids))}"
        if "device_ids" not in accelerator.offers:
            reason = "this accelerator's devices cannot be listed; say how many."
            yield Problem((flag, who), reason, ("devices", "accelerator"))
        elif outside := [index for index in ids if index >= count]:
            reason = f"there is no device {', '.join(map(str, outside))}; the visible ones are 0 to {count - 1}."
            yield Problem((flag, who), reason, ("devices",))
    elif request.devices > count and "shared_devices" not in accelerator.offers:
        found = f"{count} device{'' if count == 1 else 's'}"
        reason = f"each process wants a device of its own, and this machine has {found}."
        yield Problem((f"{request.devices} processes on this node", who), reason, ("devices", "accelerator"))


def _mesh_problems(strategy: Party, request: Request) -> Iterator[Problem]:
    if strategy.mesh_dims is None or (request.world_size > 1 and "several_processes" not in strategy.offers):
        return
    world_size, sides = request.world_size, (f"{request.world_size} processes", str(strategy))
    try:
        mesh = strategy.mesh_dims(world_size)
    except Exception as error:
        # A strategy says by raising that it cannot be laid out over so many processes.
        yield Problem(sides, f"{error} ({type(error).__name__}).", ("devices", "strategy"))
        return
    if math.prod(mesh.values()) != world_size:
        reason = f"its mesh {dict(mesh)} has {math.prod(mesh.values())} places."
        yield Problem(sides, reason, ("devices", "strategy"))


def _refusals(combination: Combination) -> Iterator[Problem]:
    strategy, request = combination.strategy, combination.request
    if strategy.refuses is None:
        return
    from .plugins import Choice  # not at the top: it imports torch, as this strategy has

    choice = Choice(
        device_type=combination.accelerator.device_type,
        policy=combination.precision.policy,
        clip=request.clip,
        accumulate=request.accumulate,
        on_skip=request.on_skip,
        world_size=request.world_size,
    )
    for axis, reason in strategy.refuses(choice):
        side = () if axis == "strategy" else (str(getattr(combination, axis, None) or f"--{FLAGS.get(axis, axis)}"),)
        yield Problem((*side, str(strategy)), reason, (axis, "strategy"))
