"""What `Module.log` records: tensors are kept where they are, and read when somebody looks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import metric_state
from .errors import ConfigurationError
from .launch import alone
from .metric_objects import Collection, MetricObject, MetricObjects, ObjectSlot
from .packed import Packed, combine
from .slot import FOLD_EVERY, SUFFIX, Slot, absent, read, reduction, scalar, stack, wide

if TYPE_CHECKING:
    from .launch.group import Group

RESERVED = ("step", "epoch")  # columns of every row
Options = tuple[bool, bool, bool | None, bool | None, Any, bool | str | None, bool]
"""Of `Module.log`: prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only."""


class Where:
    """Where a call of `log` comes from: what ``on_step`` and ``on_epoch`` mean there by default."""

    __slots__ = ("name", "on_epoch", "on_step")

    def __init__(self, name: str, on_step: bool, on_epoch: bool) -> None:
        self.name, self.on_step, self.on_epoch = name, on_step, on_epoch


STEP, EVALUATION, EPOCH = Where("step", True, False), Where("evaluation", False, True), Where("epoch", False, True)
PLACES = {where.name: where for where in (STEP, EVALUATION, EPOCH)}


class Metrics:
    """The records of one stage (training, validation, test).

    The loop sets ``defaults`` (where the user's code now runs, None where logging is not allowed), ``weight`` (samples
    in the current batch) and ``suffix`` (for several loaders).
    """

    def __init__(self, stage: str, group: Group, objects: MetricObjects | None = None) -> None:
        self.stage, self.group, self.objects = stage, group, objects
        self.slots: dict[Where | None, dict[str, Slot]] = {STEP: {}, EVALUATION: {}, EPOCH: {}, None: {}}
        self.object_slots: dict[str, ObjectSlot] = {}
        self.defaults: Where | None = None
        self.weight: float = 1.0
        self.suffix = ""
        self.muted = False
        self.sizes_known = True  # whether ``weight`` is the number of samples, and not 1 for want of it
        self.values: dict[str, Any] = {}  # name -> last value as a number or tensor: what callback_metrics shows
        self.newest_validation: dict[str, Any] = {}  # of a training: the ``values`` of its validation
        self.packed = Packed(stage, group)
        self.told: set[str] = set()  # metric objects of which a warning was given

    # ------------------------------------------------------------------------------------------------- to record

    def log(
        self, name: str, value: Any, options: Options, batch_size: float | None, add_suffix: bool, attribute: str | None
    ) -> None:
        """Record one scalar; see `Module.log`."""
        if alone.inside:
            alone.refuse_log(name, self.defaults, options[3], options[5], options[6])
        if self.muted or (options[6] and self.group.world.rank):
            return
        key = name + self.suffix if self.suffix and add_suffix else name
        slot = self.slots[self.defaults].get(key)
        if isinstance(value, Tensor):
            if value.ndim:
                value = scalar(name, value)
            # a copy: a later ``loss += ...`` or an update of a buffer writes into the same memory. On the CPU there is
            # no device to wait for, and a number is a third of the price.
            value = value.tolist() if value.is_cpu else value.detach().clone()
        elif not isinstance(value, (int, float)):
            if isinstance(value, Number) and not isinstance(value, complex):
                value = float(value)  # type: ignore[arg-type]  # numpy's scalars
            elif isinstance(value, MetricObject):
                self._log_object(name, value, key[len(name) :], options, attribute)
                return
            else:
                raise ConfigurationError(
                    f"log({name!r}) got {value!r}; expected a number, a 0-dim tensor, or an object with update, "
                    "compute and reset."
                )
        if slot is None or slot.options != options:
            _check(name, value, batch_size)
            slot = self._slot(slot, name, key, options)
            if not self.sizes_known and batch_size is None and slot.on_epoch and self.defaults is not EPOCH:
                self._tell_of_sizes(slot)
        if slot.on_step:
            slot.last = value
            slot.touched = True
            if slot.special:
                slot.last_weight = self.weight if batch_size is None else batch_size
                if slot.steps is not None:
                    slot.steps.append(value)
        if slot.on_epoch:
            slot.pending.append(value)
            slot.weights.append(
                batch_size if batch_size is not None else 1.0 if self.defaults is EPOCH else self.weight
            )
            if len(slot.pending) == FOLD_EVERY:
                slot.fold()

    def log_collection(self, metric: Any, options: Options, add_suffix: bool) -> None:
        """A collection of metric objects, each under its own name; see `Module.log_dict`."""
        if alone.inside:
            alone.refuse_log(", ".join(metric), self.defaults, options[3], options[5], options[6])
        if not self.muted and not (options[6] and self.group.world.rank):
            self._log_object("", metric, self.suffix if add_suffix else "", options, None)

    def _slot(self, slot: Slot | None, name: str, key: str, options: Options) -> Slot:
        """The slot of a name that is logged for the first time; refuses other options than then."""
        step, epoch = self._when(name, options)
        prog_bar, logger, _, _, reduce_fx, sync, local = options
        fx = reduction(name, reduce_fx)
        if sync not in (None, True, False, "sparse"):
            raise ConfigurationError(f"log({name!r}, sync_dist={sync!r}): allowed are True, False and 'sparse'.")
        if local and sync:
            raise ConfigurationError(
                f"log({name!r}, rank_zero_only=True, sync_dist={sync!r}): a value of rank 0 alone is not reduced over "
                "ranks. Leave out one of the two."
            )
        wanted = (bool(prog_bar), logger is None or bool(logger), step, epoch, fx, sync or False, bool(local))
        if slot is None:
            assert self.defaults is not None
            slot = self.slots[self.defaults][key] = Slot(name, key[len(name) :], self.defaults.name, *wanted)
        elif wanted != (slot.prog_bar, slot.logger, slot.on_step, slot.on_epoch, slot.fx, slot.sync, slot.local):
            raise ConfigurationError(
                f"log({name!r}) was called twice with different options in {_caller()} or a hook like it. Use the same "
                "ones, or another name."
            )
        slot.options = options
        return slot

    def _tell_of_sizes(self, slot: Slot) -> None:
        if slot.fx != "mean":
            return
        self.sizes_known = True  # said once
        warnings.warn(
            f"the size of a batch is not known in {self.stage}, since no batch sampler of a torch DataLoader says it, "
            f"so all batches count alike in the mean of {slot.full_name!r}. Give log(..., batch_size=...), or define "
            "batch_weight.",
            stacklevel=5,
        )

    def _when(self, name: str, options: Options) -> tuple[bool, bool]:
        """``on_step`` and ``on_epoch``, where the caller may log, and under a name that is allowed."""
        where = self.defaults
        if where is None:
            raise ConfigurationError(
                f"log({name!r}) was called in {_caller()}, which belongs to no step and no epoch, so the value would "
                "be in no row. Log it in a step or in an epoch's start or end hook, or give it to self.logger directly."
            )
        if not isinstance(name, str):
            raise ConfigurationError(f"log({name!r}, ...): the first argument is the metric's name, a string.")
        if name in RESERVED or SUFFIX in name:
            why = "every row has it: updates applied, or the epoch" if name in RESERVED else "Trivet adds that itself"
            raise ConfigurationError(f"log({name!r}): this name is taken, {why}. Choose another.")
        step = where.on_step if options[2] is None else options[2]
        epoch = where.on_epoch if options[3] is None else options[3]
        if where is EPOCH and step:
            raise ConfigurationError(f"log({name!r}, on_step=True) was called in {_caller()}, which has no step.")
        if not step and not epoch:
            raise ConfigurationError(f"log({name!r}, on_step=False, on_epoch=False) would record nothing.")
        return step, epoch

    def _log_object(self, name: str, metric: Any, suffix: str, options: Options, attribute: str | None) -> None:
        if name and isinstance(metric, Collection):
            raise ConfigurationError(f"log({name!r}) got a collection of metrics. Use log_dict(collection).")
        assert self.objects is not None
        key = name + suffix if name else f"{id(metric)}{suffix}"  # as `ObjectSlot.key`
        slot = self.object_slots.get(key)
        if slot is None or slot.options != options:
            step, epoch = self._when(name, options)
            path = self.objects.path_of(name or "the collection", metric, attribute)
            slot = ObjectSlot(name, suffix, metric, path, options[0], options[1], step, epoch)
            self.object_slots[key] = slot
            slot.options = options
        slot.used = True
        if slot.on_step:
            slot.last = self.objects.batch_values.get(id(metric))
            if slot.last is None:
                raise ConfigurationError(
                    f"log({name or slot.path!r}, on_step=True) wants what the metric gives for this batch, but it was "
                    f"updated only. Call it, self.{slot.path}(...), instead of update, or log it with on_step=False, "
                    "on_epoch=True."
                )
            slot.touched = True

    # ------------------------------------------------------------------------------------------------ to write rows

    def step_row(self) -> dict[str, float]:
        """The values logged for steps since the last row, with one transfer from the device; resets ``touched``.

        On several ranks one collective, whether or not any value is reduced: all ranks call it together.
        """
        slots = [s for table in self.slots.values() for s in table.values() if s.touched]
        if self.group.world.world_size > 1:
            self._join_steps(sorted((s for s in slots if s.sync), key=lambda s: s.entry))
        entries = [(s.full_name, s.step_name, s.last, s.logger) for s in slots]
        for one in self.object_slots.values():
            if one.touched:
                entries += [(*names, one.logger) for names in one.values(one.last, "_step")]
                one.touched = False
        for slot in slots:
            slot.touched = False
        return self._written(entries)

    def _join_steps(self, slots: list[Slot]) -> None:
        """Exchange the steps' values that are reduced over ranks for the reduced ones."""
        values = [s.last * s.last_weight if s.fx == "mean" else s.last for s in slots]
        weights = [s.last_weight for s in slots]
        reduced = self.packed.reduce([s.entry for s in slots], stack(values) if values else self._nothing(), weights)
        for slot in slots:
            slot.last = reduced[slot.entry]

    def epoch_row(self, *, reset: bool = True) -> dict[str, float]:
        """The epoch's values, reduced over all ranks in one collective; all ranks call it together.

        Returns those that are meant for the loggers.
        """
        slots = [s for table in self.slots.values() for s in table.values() if s.on_epoch]
        for slot in slots:
            slot.fold()
        slots = sorted((s for s in slots if s.total is not None), key=lambda s: s.entry)
        entries = [(s.full_name, s.epoch_name, value, s.logger) for s, value in self._reduce(slots)]
        for slot in [s for table in self.slots.values() for s in table.values()]:
            if slot.touched and slot.on_step:
                self.values[slot.step_name] = slot.last
                slot.touched = False
            if reset:
                slot.clear()
        return self._written([*entries, *self._objects_row(reset)])

    def batch_rows(self) -> list[dict[str, float]]:
        """What evaluation logged with ``on_step``, a row for each batch of this rank; forgets it."""
        slots = [s for table in self.slots.values() for s in table.values() if s.steps]
        numbers = read([value for s in slots for value in s.steps or ()])
        rows: list[dict[str, float]] = [{} for _ in range(max((len(s.steps or ()) for s in slots), default=0))]
        start = 0
        for slot in slots:
            count = len(slot.steps or ())
            for row, number in zip(rows, numbers[start : start + count], strict=False):
                if slot.logger:
                    row[slot.step_name] = number
            start, slot.steps = start + count, []
        return [row for row in rows if row]

    def _written(self, entries: Iterable[tuple[str, str, Any, bool]]) -> dict[str, float]:
        """Remember ``(name, forked name, value, for the loggers)``; the row for the loggers."""
        entries = list(entries)
        row = {}
        for (name, forked, _, logger), number in zip(entries, read([e[2] for e in entries]), strict=True):
            self.values[name] = self.values[forked] = number
            if logger:
                row[forked] = number
        return row

    def _reduce(self, slots: list[Slot]) -> list[tuple[Slot, float]]:
        """Each slot with its value over all ranks, and those of other ranks where this one had no batch."""
        alone = self.group.world.world_size == 1
        local = [s for s in slots if alone or s.local]
        numbers = read([s.total for s in local])
        found = [(s, combine(s.fx, [(value, s.weight)])) for s, value in zip(local, numbers, strict=True)]
        if alone:
            return found
        shared = {s.entry: s for s in slots if not s.local}
        objects = sorted(o.entry for o in self.object_slots.values() if o.used and o.on_epoch)
        totals = stack([s.total for s in shared.values()]) if shared else self._nothing()
        totals = torch.cat([totals, totals.new_zeros(len(objects))])
        weights = [*(s.weight for s in shared.values()), *[0.0] * len(objects)]
        reduced = self.packed.reduce([*shared, *objects], totals, weights)  # all ranks
        for entry, value in reduced.items():
            if entry.startswith("object "):
                self._take_part(entry)
            else:
                found.append((shared.get(entry) or absent(entry), value))
        return found

    def _nothing(self) -> Tensor:
        return torch.zeros(0, dtype=wide(self.group.device), device=self.group.device)

    def _take_part(self, entry: str) -> None:
        """A rank without a batch has not logged a metric object that the others compute together."""
        slot = next((o for o in self.object_slots.values() if o.entry == entry), None)
        if slot is None:
            assert self.objects is not None
            slot = ObjectSlot.absent(entry, self.objects)
            self.object_slots[slot.key] = slot
        slot.used = True  # also of one that was made or logged in an earlier epoch

    def _objects_row(self, reset: bool) -> list[tuple[str, str, Any, bool]]:
        """Compute the metric objects, in an order that is the same on all ranks, and reset them."""
        entries = []
        used = sorted((o for o in self.object_slots.values() if o.used), key=lambda o: o.entry)
        for one in used:
            if one.on_epoch:
                entries += [(*names, one.logger) for names in one.values(one.compute(), "_epoch")]
        if reset:
            for one in used:
                if one.touched:
                    self.values.update((forked, value) for _, forked, value in one.values(one.last, "_step"))
                one.metric.reset()
                one.used = one.touched = False
        return entries

    # ---------------------------------------------------------------------------------------------------- to look at

    def clear(self) -> None:
        """Forget all values, such as those of a sanity check; what was declared stays."""
        self.values.clear()
        for table in self.slots.values():
            for slot in table.values():
                slot.clear()
                slot.last, slot.touched = None, False
                slot.steps = None if slot.steps is None else []

    def shown(self) -> dict[str, float]:
        """The newest value of each metric that goes on the progress bar."""
        found: dict[str, Any] = {}
        for table in self.slots.values():
            for slot in table.values():
                if slot.prog_bar and slot.on_step and slot.last is not None:
                    found[slot.step_name] = slot.last
                if slot.prog_bar and slot.on_epoch and slot.epoch_name in self.values:
                    found[slot.epoch_name] = self.values[slot.epoch_name]
        for one in self.object_slots.values():
            if one.prog_bar and one.last is not None:
                found.update((forked, value) for _, forked, value in one.values(one.last, "_step"))
            if one.prog_bar and one.on_epoch and one.name:
                name = f"{one.name}{'_epoch' if one.on_step else ''}{one.suffix}"
                found.update({name: self.values[name]} if name in self.values else {})
        return dict(zip(found, read(list(found.values())), strict=True))

    def newest(self) -> dict[str, float]:
        """The newest value of every metric, under its name and, where it is logged for step and epoch, under both."""
        merged = dict(self.values)
        for slot in (*self.slots[STEP].values(), *self.slots[EPOCH].values()):
            if slot.touched:
                merged[slot.full_name] = merged[slot.step_name] = slot.last
        for one in self.object_slots.values():
            if one.touched:
                for name, forked, value in one.values(one.last, "_step"):
                    merged[name] = merged[forked] = value
        return dict(zip(merged, read(list(merged.values())), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The running epoch's accumulators, of all ranks, and validation's newest values. All ranks call it."""
        return metric_state.of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back this rank's share; at another world size the shares are dealt out and joined."""
        metric_state.load(self, state)


class Silent(Metrics):
    """Records nothing: what ``Trainer(barebones=True)`` has instead."""

    def log(self, *args: Any) -> None:
        return

    def log_collection(self, *args: Any) -> None:
        return

    def step_row(self) -> dict[str, float]:
        return {}

    def epoch_row(self, *, reset: bool = True) -> dict[str, float]:
        return {}


def _check(name: str, value: Any, batch_size: float | None) -> None:
    if isinstance(value, complex):  # of a tensor
        raise ConfigurationError(f"log({name!r}) got {value!r}; expected a real number. Log its .real or .abs().")
    if batch_size is not None and batch_size < 0:
        raise ConfigurationError(f"log({name!r}, batch_size={batch_size!r}): expected the number of samples.")


def _caller() -> str:
    """The user's function that called `Module.log`, for a message."""
    frame: Any = sys._getframe(1)
    own = {__file__, __file__.replace("metrics.py", "module.py")}
    while frame is not None and frame.f_code.co_filename in own:
        frame = frame.f_back
    return f"{frame.f_code.co_qualname}()" if frame is not None else "a hook"
