"""What a checkpoint holds of the metrics of a running epoch, by rank, as plain data."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import torch

from .slot import Slot, read

if TYPE_CHECKING:
    from .metrics import Metrics


def of(metrics: Metrics) -> dict[str, Any]:
    """The accumulators of all ranks. Numbers go through the store; the tensors of metric objects, where the module has
    any, in a collective. Pending values stay apart, so that a save changes no sum."""
    slots = [(where, key, s) for where, table in metrics.slots.items() if where for key, s in table.items()]
    totals = read([0.0 if s.total is None else s.total for _, _, s in slots])
    mine = [
        {
            "place": where.name, "key": key, "name": s.name, "suffix": s.suffix,
            "options": [s.prog_bar, s.logger, s.on_step, s.on_epoch, s.fx, s.sync, s.local], "weight": s.weight,
            "total": None if s.total is None else total, "pending": read(s.pending), "weights": s.weights,
        }
        for (where, key, s), total in zip(slots, totals, strict=True)
    ]  # fmt: skip
    _tell_of_lost(metrics)
    ranks = [json.loads(text) for text in metrics.group.exchange(f"state/{metrics.stage}", json.dumps(mine))]
    newest = metrics.newest_validation  # schedules and callbacks may look at it before validation runs again
    state = {"ranks": ranks, "validation": dict(zip(newest, read(list(newest.values())), strict=True))}
    if metrics.objects is None or not metrics.objects.stateful:
        return state
    return {**state, "objects": _gathered(metrics), "logged": _logged(metrics)}


def _tell_of_lost(metrics: Metrics) -> None:
    """Within an epoch: of objects that cannot be read by name a resumed run would know only what comes after."""
    from .metric_objects import Collection, Stateful

    for one in metrics.object_slots.values():
        parts = [part for _, part in one.metric.items()] if isinstance(one.metric, Collection) else [one.metric]
        lost = next((part for part in parts if not isinstance(part, Stateful)), None)
        if lost is None or not one.used or one.path in metrics.told or metrics.group.world.rank:
            continue
        metrics.told.add(one.path)
        warnings.warn(
            f"a checkpoint written within an epoch does not hold what the metric {one.path!r} ({type(lost).__name__}) "
            "has gathered: a run that goes on from it computes this epoch's value from the batches that are left. "
            "Derive the metric from torchmetrics.Metric, or save at the end of epochs.",
            stacklevel=2,
        )


def _gathered(metrics: Metrics) -> list[Any]:
    assert metrics.objects is not None
    share = metrics.objects.state_dict()
    world_size = metrics.group.world.world_size
    if world_size == 1:
        return [share]
    shares: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(shares, share)  # all ranks: they have the same module
    return shares


def _logged(metrics: Metrics) -> list[list[Any]]:
    """Which metric objects were logged in this epoch, so that it ends with them even if no batch is left."""
    found = [o for o in metrics.object_slots.values() if o.used]
    return [[o.path, o.name, o.suffix, o.prog_bar, o.logger, o.on_step, o.on_epoch] for o in found]


def load(metrics: Metrics, state: dict[str, Any]) -> None:
    """Take back this rank's share; at another world size the shares are dealt out and joined."""
    from .metric_objects import ObjectSlot
    from .metrics import PLACES

    metrics.newest_validation.update((name, float(value)) for name, value in state.get("validation", {}).items())
    world = metrics.group.world
    for share in state.get("ranks", [])[world.rank :: world.world_size]:
        for v in share:
            slot = Slot(v["name"], v["suffix"], v["place"], *v["options"])
            slot.total = None if v["total"] is None else torch.tensor(v["total"], dtype=torch.float64)
            slot.weight, slot.pending, slot.weights = v["weight"], list(v["pending"]), list(v["weights"])
            table = metrics.slots[PLACES[v["place"]]]
            if v["key"] in table:
                table[v["key"]].join(slot)
            else:
                table[v["key"]] = slot
    if metrics.objects is None:
        return
    metrics.objects.load_state_dict(state.get("objects", [])[world.rank :: world.world_size])
    for path, name, suffix, *flags in state.get("logged", []):
        metric = metrics.objects.find(path)
        if metric is not None:
            slot_of = ObjectSlot(name, suffix, metric, path, *flags)
            slot_of.used = True
            metrics.object_slots[slot_of.key] = slot_of
