"""Whether a combination can run: `negotiate` gives its Plan, or one error that lists every conflict with a remedy.

Capability names are plain strings that plugins offer and want; `combination.KNOWN` lists ours, and only that module
says what goes together. `resolve` makes the plugins, chooses for ``auto`` and negotiates: it is what Trainer, Runtime
and ``trivet plan`` call. Importing this module imports neither torch nor a plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from . import node_flags, registry
from .combination import Combination as Combination
from .combination import Party as Party
from .combination import Problem as Problem
from .combination import Request as Request
from .combination import party, problems
from .errors import ConfigurationError as ConfigurationError
from .errors import Conflict, PlanError, PluginError
from .launch import environments, profiles
from .launch.world import World
from .plan import Plan as Plan
from .registry import Selected
from .remedies import Alternatives, own_plugins, remedy

if TYPE_CHECKING:
    from .plugins import Clip

# What accelerator="auto" tries, in this order; only Trivet's own are looked at.
AUTO_ORDER = ("cuda", "xla", "xpu", "mps", "cpu")


# What the flags that say how processes are started come to in those processes.
AS_LAUNCHED: dict[str, Any] = {"launcher": "auto", "node_rank": None, "main_address": None, "main_port": None}


class Resolved(NamedTuple):
    """A Plan, the plugins that it was made of, and the facts that were judged.

    ``launcher`` is None where no process is to be started.
    """

    plan: Plan
    strategy: Selected
    accelerator: Selected
    precision: Selected
    launcher: Selected | None
    combination: Combination

    @property
    def where(self) -> dict[str, Any]:
        """Which machine this is, as an argument of `Launcher.launch`; nothing where the launcher works on all."""
        node = self.combination.request.node
        return {} if node is None or node.num_nodes == 1 else {"node": node}


def negotiate(
    module: Party | None,
    strategy: Selected,
    accelerator: Selected,
    precision: Selected,
    request: Request,
    *,
    alternatives: Alternatives = own_plugins,
) -> Plan:
    """Return the Plan of a combination that can run. Pure: starts nothing, creates no device context.

    Raises PlanError with all conflicts; each names both sides and, where one exists among ``alternatives``, flags that
    make the whole combination run. ``alternatives`` is called only after a refusal.
    """
    combination = Combination(module, party(strategy), party(accelerator), party(precision), request)
    return _negotiate(combination, strategy, accelerator, precision, alternatives)


def _negotiate(
    combination: Combination, strategy: Selected, accelerator: Selected, precision: Selected, alternatives: Alternatives
) -> Plan:
    if found := problems(combination):
        raise PlanError(tuple(_conflicts(combination, found, alternatives)), combination)
    request = combination.request
    policy, scaling = precision.plugin.policy, precision.plugin.scaling
    world_size, sides = request.world_size, (strategy, accelerator, precision)
    return Plan(
        strategy=strategy.name,
        accelerator=accelerator.name,
        precision=precision.name,
        device_type=accelerator.plugin.device_type,
        param_dtype=_dtype_name(policy.param),
        compute_dtype=_dtype_name(policy.compute),
        reduce_dtype=_dtype_name(policy.reduce),
        state_dtype=_dtype_name(strategy.plugin.state_dtype(policy)),
        backend=accelerator.plugin.collective_backend if world_size > 1 else None,
        devices=request.devices,
        device_ids=request.device_ids,
        num_nodes=request.num_nodes,
        world_size=world_size,
        mesh=dict(strategy.plugin.mesh_dims(world_size)),
        scaling=None if scaling is None else asdict(scaling),
        clip=None if request.clip is None else asdict(request.clip),
        accumulate=request.accumulate,
        global_batch_size=request.global_batch_size,
        manual=request.manual,
        on_skip=request.on_skip,
        deterministic=request.deterministic,
        launcher=request.world.source if request.world else request.launcher.name if request.launcher else "single",
        comm_profile=request.comm_profile,
        returns_weights=request.returns_weights,
        distributions={side.kind: side.distribution for side in sides},
        versions={side.kind: side.version for side in sides},
        options={side.kind: dict(side.options) for side in sides},
        notes=(*request.notes, *_notes(combination), *strategy.plugin.notes(world_size, request.deterministic)),
    )


def recheck(resolved: Resolved, accumulate: int) -> int:
    """The number of micro-batches of an update, once the data has said it, where that can run too. Raises PlanError."""
    combination = resolved.combination
    combination = replace(combination, request=replace(combination.request, accumulate=accumulate))
    if found := problems(combination):
        raise PlanError(tuple(_conflicts(combination, found, own_plugins)), combination)
    return accumulate


def _conflicts(combination: Combination, found: list[Problem], alternatives: Alternatives) -> Iterator[Conflict]:
    flags = ""
    for problem in found:
        # Each remedy mends everything, so the last one serves again where it changes what this problem is about.
        if not any(f"--{axis} " in flags for axis in problem.axes):
            flags = remedy(combination, problem.axes, alternatives)
        nothing = "" if flags else " No combination of Trivet's own plugins was found instead."
        yield Conflict(problem.parties, problem.reason + nothing, flags)


def _notes(combination: Combination) -> list[str]:
    accelerator, strategy, request = combination.accelerator, combination.strategy, combination.request
    notes = []
    if request.devices > accelerator.device_count:
        notes.append(f"{request.devices} processes share {accelerator.device_count} device(s) of {accelerator}")
    if request.world_size == 1 and "several_processes" in strategy.offers:
        notes.append(f"{strategy} has one process: it communicates with nobody")
    return notes


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------------------- auto


def auto_accelerator() -> tuple[str, str]:
    """The qualified name of the first of Trivet's own accelerators that is available, and why it was chosen.

    The order is `AUTO_ORDER`. Somebody else's accelerator is never chosen: it has to be named.
    """
    own = {entry.name: entry for entry in registry.entries("accelerator") if entry.distribution == "trivet"}
    passed_over: dict[str, str] = {}
    for name in AUTO_ORDER:
        if name not in own:
            continue
        try:
            plugin = registry.make("accelerator", own[name].qualified).plugin
        except PluginError as error:
            passed_over[name] = str(error)
            continue
        if plugin.is_available():
            first = next(iter(passed_over.values()), "")  # most have no GPU but CUDA's to miss
            others = ", ".join(list(passed_over)[1:])
            told = [f"accelerator auto: {name}", first, others and f"not available either: {others}"]
            return own[name].qualified, "; ".join(filter(None, told))
        passed_over[name] = f"{name} is not available: {plugin.unavailable_reason()}"
    raise ConfigurationError(f"accelerator 'auto' found nothing: {'; '.join(passed_over.values())}.")


def auto_strategy(devices: int, num_nodes: int) -> tuple[str, str]:
    """The qualified name of the strategy for that many processes, and why: single for one, ddp for more."""
    name = "single" if devices * num_nodes == 1 else "ddp"
    return f"trivet:{name}", f"strategy auto: {name}, for {_processes(devices * num_nodes)}"


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def resolve_devices(
    devices: int | str | Sequence[int], accelerator: Party, world: World | None = None
) -> tuple[int, tuple[int, ...] | None, tuple[str, ...]]:
    """The number of processes on this node, the device ids if they were listed, and notes on what was chosen.

    ``devices``: a count (2 or ``"2"``), -1 for all, ids (``[0, 2]`` or ``"0,2"``), or ``"auto"``: what the environment
    says; without one every device of its own, or one process where devices are shared (the CPU).
    """
    if isinstance(devices, str):
        text = devices.strip()
        try:
            devices = text if text == "auto" else [int(part) for part in text.split(",")] if "," in text else int(text)
        except ValueError:
            raise _bad_devices(devices) from None
    if devices == "auto":
        if world is not None:
            return world.local_world_size, None, (f"devices auto: {world.local_world_size}, from {world.source}",)
        if "shared_devices" in accelerator.offers:
            return 1, None, (f"devices auto: 1, since processes share the devices of {accelerator}",)
        count = max(1, accelerator.device_count)
        return count, None, (f"devices auto: {count}, all of {accelerator}",)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        ids = tuple(devices)
        if not ids or len(set(ids)) != len(ids) or not all(_is_count(index) and index >= 0 for index in ids):
            raise _bad_devices(devices)
        return len(ids), ids, ()
    if not isinstance(devices, int) or not _is_count(devices) or devices < -1 or devices == 0:
        raise _bad_devices(devices)
    if devices == -1:
        return max(1, accelerator.device_count), None, ()
    return devices, None, ()


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_devices(devices: Any) -> ConfigurationError:
    return ConfigurationError(
        f"devices={devices!r}. Expected a number of processes (1, 2, ...), -1 for all devices, distinct device ids "
        "such as [0, 2], or 'auto'."
    )


def resolve(
    *,
    accelerator: Any = "auto",
    strategy: Any = "auto",
    precision: Any = "fp32",
    devices: int | str | Sequence[int] = "auto",
    num_nodes: int = 1,
    node_rank: int | None = None,
    main_address: str | None = None,
    main_port: int | None = None,
    world: World | None = None,
    module: Party | None = None,
    manual: bool = False,
    on_skip: str | None = None,
    accumulate: int | None = 1,
    global_batch_size: int | None = None,
    clip: Clip | None = None,
    deterministic: bool = False,
    returns_weights: bool = True,
    needs: Mapping[str, frozenset[str]] | None = None,
    launcher: Any = "auto",
    comm_profile: str | None = None,
) -> Resolved:
    """Make the plugins from what the user gave, choose for ``auto``, and negotiate.

    ``node_rank``, ``main_address`` and ``main_port`` are for launchers that are started on each of ``num_nodes``.
    ``world`` is what an environment or launcher says, or None; then `environments.node` is asked, too. Where one of
    them says more nodes, ``num_nodes=1`` counts as not given. ``launcher`` is ``"auto"`` in workers; otherwise that
    starts several processes on this machine, where no environment did. ``comm_profile`` is a name in `launch.profiles`,
    or ``"auto"``.
    Raises what `registry.make` and `negotiate` raise, and ConfigurationError for values that mean nothing.
    """
    if not _is_count(num_nodes) or num_nodes < 1:
        raise ConfigurationError(f"num_nodes={num_nodes!r}. Expected 1 or more.")
    if world is not None and world.source == "single":
        world = None
    given = node_flags.check(node_rank, main_address, main_port)
    node = environments.node() if world is None else None
    notes: list[str] = []
    if accelerator == "auto":
        accelerator, why = auto_accelerator()
        notes.append(why)
    chosen_accelerator = registry.make("accelerator", accelerator)
    if devices == "auto" and node is not None and node.devices is not None:
        devices = node.devices
        notes.append(f"devices auto: {devices}, from {node.source}")
    count, device_ids, chosen = resolve_devices(devices, party(chosen_accelerator), world)
    notes += chosen
    facts = world or node
    if facts is not None and facts.num_nodes > 1 and num_nodes == 1:
        num_nodes = facts.num_nodes
        notes.append(f"num_nodes: {num_nodes}, from {facts.source}")
    if facts is None and (node := node_flags.node(given, num_nodes)) is not None:
        notes.append(f"node {node.rank} of {num_nodes}, which meet at {node.address}")
    if strategy == "auto":
        strategy, why = auto_strategy(count, num_nodes)
        notes.append(why)
    if comm_profile is not None:
        device_type = chosen_accelerator.plugin.device_type
        comm_profile, why_profile = profiles.resolve(comm_profile, device_type, num_nodes, started=world is not None)
        notes += why_profile
    chosen_strategy, chosen_precision = registry.make("strategy", strategy), registry.make("precision", precision)
    if facts is None and count * num_nodes == 1:
        notes += environments.hints()
    starts = None
    if launcher != "auto":
        starts = registry.make("launcher", launcher)
    elif world is None and count * num_nodes > 1:
        starts = registry.make("launcher", "trivet:local")
    request = Request(
        devices=count,
        device_ids=device_ids,
        num_nodes=num_nodes,
        world=world,
        node=node,
        place=given,
        launcher=None if starts is None else party(starts),
        manual=manual,
        on_skip=on_skip,
        accumulate=accumulate,
        global_batch_size=global_batch_size,
        clip=clip,
        deterministic=deterministic,
        returns_weights=returns_weights,
        comm_profile=comm_profile,
        needs=needs or {},
        notes=tuple(notes),
    )
    sides = chosen_strategy, chosen_accelerator, chosen_precision
    combination = Combination(
        module, party(chosen_strategy), party(chosen_accelerator), party(chosen_precision), request
    )
    plan = _negotiate(combination, *sides, own_plugins)
    return Resolved(plan, *sides, starts, combination)
