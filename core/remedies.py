"""What to use instead of a combination that cannot run: a search over our own plugins. Used only after a refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from . import registry
from .combination import FLAGS, Combination, Party, party, problems
from .errors import ConfigurationError, PluginError
from .node_flags import NodeFlags

# Names to propose first; the others follow in the alphabet's order.
_PREFERRED = {
    "strategy": ("ddp", "single"),
    "accelerator": ("cuda", "xla", "xpu", "mps", "cpu"),
    "precision": ("fp32", "bf16-mixed"),
}
_MOST_CHANGES = 4
_MOST_DEVICES = 16

Alternatives = Callable[[str], Iterable[tuple[str, registry.Selected]]]


def own_plugins(kind: str) -> Iterator[tuple[str, registry.Selected]]:
    """Trivet's own plugins of a kind with the names to select them by. Imports them, and nobody else's."""
    listed = registry.entries(kind)
    counts = Counter(entry.name for entry in listed)
    order = {name: position for position, name in enumerate(_PREFERRED[kind])}
    for entry in sorted(listed, key=lambda entry: (order.get(entry.name, len(order)), entry.name)):
        if entry.distribution != "trivet":
            continue
        try:
            selected = registry.make(kind, entry.qualified)
        except (PluginError, ConfigurationError):
            continue  # its library is not installed, or it has options without a default: no remedy
        yield (entry.name if counts[entry.name] == 1 else entry.qualified), selected


def remedy(combination: Combination, axes: tuple[str, ...], alternatives: Alternatives) -> str:
    """The smallest change, as flags, that makes the whole combination run, or an empty string.

    ``axes`` is what the conflict is about: something of it is part of the change. Nothing that the environment decides
    is proposed.
    """
    known: dict[str, list[tuple[str, Party]]] = {}

    def plugins(kind: str) -> list[tuple[str, Party]]:
        if kind not in known:
            known[kind] = [(name, party(selected)) for name, selected in alternatives(kind)]
        return known[kind]

    order = dict.fromkeys((*axes, *_AXES))
    for size in range(1, _MOST_CHANGES + 1):
        for chosen in combinations(order, size):
            if set(chosen) & set(axes) and (flags := _search(combination, chosen, plugins)):
                return flags
    return ""


def _search(combination: Combination, axes: tuple[str, ...], plugins: Callable[[str], list[tuple[str, Party]]]) -> str:
    if not axes:
        return "" if problems(combination) else " "
    for flag, changed in _changes(combination, axes[0], plugins):
        if rest := _search(changed, axes[1:], plugins):
            return f"{flag} {rest.strip()}".strip()
    return ""


def _changes(
    combination: Combination, axis: str, plugins: Callable[[str], list[tuple[str, Party]]]
) -> Iterator[tuple[str, Combination]]:
    """Every change along one axis, with its flag."""
    if axis in _PREFERRED:
        current = getattr(combination, axis)
        for name, other in plugins(axis):
            if (other.name, other.distribution) != (current.name, current.distribution):
                side: dict[str, Any] = {axis: other}
                yield f"--{axis} {name}", replace(combination, **side)
        return
    for value in _AXES.get(axis, _no_values)(combination):
        fields: dict[str, Any] = {axis: value}
        if axis == "devices":
            fields["device_ids"] = None
        flag = combination.request.place.without if axis == "place" else _flag(axis, value)
        yield flag, replace(combination, request=replace(combination.request, **fields))


def _flag(axis: str, value: Any) -> str:
    nothing = "auto" if axis == "launcher" else "null"
    return f"--{FLAGS.get(axis, axis)} {nothing if value is None else value}"


def _no_values(combination: Combination) -> Iterable[Any]:
    return ()


def _device_counts(combination: Combination) -> Iterable[int]:
    """Fewer processes, most of them first, then more, up to the number of devices."""
    request = combination.request
    if request.world is not None:
        return [request.world.local_world_size] if request.devices != request.world.local_world_size else []
    count = combination.accelerator.device_count
    largest = request.devices if "shared_devices" in combination.accelerator.offers else min(request.devices, count)
    fewer = range(largest, max(0, largest - _MOST_DEVICES), -1)
    more = range(request.devices + 1, min(count, request.devices + _MOST_DEVICES) + 1)
    changed = request.device_ids is not None
    return [n for n in dict.fromkeys(chain(fewer, [1], more)) if n > 0 and (changed or n != request.devices)]


def _node_counts(combination: Combination) -> Iterable[int]:
    request = combination.request
    facts = request.world or (None if str(request.place) else request.node)
    right = 1 if facts is None else facts.num_nodes
    return [right] if request.num_nodes != right else []


def _accumulations(combination: Combination) -> Iterable[int]:
    request = combination.request  # where it follows from the data, no flag changes it
    return [1] if request.accumulate != 1 and request.global_batch_size is None else []


# The axes of the search in their order; those without a function are kinds of plugin.
_AXES: dict[str, Callable[[Combination], Iterable[Any]]] = {
    "devices": _device_counts,
    "strategy": _no_values,
    "precision": _no_values,
    "accelerator": _no_values,
    "num_nodes": _node_counts,
    "place": lambda combination: [NodeFlags()] if str(combination.request.place) else [],
    "launcher": lambda combination: [None] if combination.request.launcher and combination.request.world else [],
    "on_skip": lambda combination: ["update"] if combination.request.on_skip == "samples" else [],
    "accumulate": _accumulations,
    "clip": lambda combination: [None] if combination.request.clip is not None else [],
}
