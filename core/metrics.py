"""What `Module.log` records: tensors are kept where they are, and read when somebody looks."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import ConfigurationError, TrivetError

if TYPE_CHECKING:
    from .launch.group import Group

REDUCTIONS = ("mean", "sum", "min", "max")
FOLD_EVERY = 128  # pending values of one metric, so that memory does not grow with the run

# where a call comes from -> the defaults (on_step, on_epoch); None: not allowed there
STEP, EVALUATION, EPOCH = (True, False), (False, True), (False, True)


class Slot:
    """One metric of one stage."""

    __slots__ = (
        "batch_size", "fx", "last", "logger", "name", "on_epoch", "on_step", "pending", "prog_bar", "sync", "total",
        "touched", "weight", "weights",
    )  # fmt: skip

    def __init__(self, name: str, prog_bar: bool, logger: bool, on_step: bool, on_epoch: bool, fx: str, sync: bool):
        self.name, self.prog_bar, self.logger = name, prog_bar, logger
        self.on_step, self.on_epoch, self.fx, self.sync = on_step, on_epoch, fx, sync
        self.last: Any = None
        self.touched = False  # whether a step's value waits to be written
        self.clear()

    def clear(self) -> None:
        self.pending: list[Any] = []
        self.weights: list[float] = []
        self.total: Tensor | None = None  # float64: weighted sum, or the extreme
        self.weight = 0.0

    @property
    def step_name(self) -> str:
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        return f"{self.name}_epoch" if self.on_step else self.name

    def fold(self) -> None:
        """Join the pending values to the accumulator, one after the other, so that the moment makes no difference."""
        if not self.pending:
            return
        values = stack(self.pending)
        if self.total is not None:
            self.total = self.total.to(values)
        if self.fx in ("min", "max"):
            if self.total is not None:
                values = torch.cat([self.total.reshape(1), values])
            self.total = values.amin() if self.fx == "min" else values.amax()
        else:
            weights = self.weights if self.fx == "mean" else [1.0] * len(self.weights)
            parts = values * torch.tensor(weights, dtype=values.dtype, device=values.device)
            start = self.total if self.total is not None else parts.new_zeros(())
            self.total = torch.cat([start.reshape(1), parts]).cumsum(0)[-1]  # cumsum is sequential
        self.weight += sum(self.weights)
        self.pending, self.weights = [], []

    def join(self, other: Slot) -> None:
        """Add what another rank accumulated."""
        self.fold()
        other.fold()
        if self.total is None or other.total is None:
            self.total = self.total if other.total is None else other.total
        elif self.fx in ("min", "max"):
            self.total = (torch.minimum if self.fx == "min" else torch.maximum)(self.total, other.total)
        else:
            self.total = self.total + other.total
        self.weight += other.weight


def stack(values: list[Any]) -> Tensor:
    """Numbers and 0-dim tensors as one float64 tensor (float32 where the device has no float64)."""
    device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=dtype)
    return torch.stack([torch.as_tensor(v, dtype=dtype, device=device).reshape(()) for v in values])


class Metrics:
    """The records of one stage (training or validation).

    The loop sets ``defaults`` (what ``on_step`` and ``on_epoch`` mean where the user's code now runs, None where
    logging is not allowed), ``weight`` (samples in the current batch) and ``suffix`` (for several loaders).
    """

    def __init__(self, stage: str, group: Group) -> None:
        self.stage, self.group = stage, group
        self.slots: dict[str, Slot] = {}
        self.defaults: tuple[bool, bool] | None = None
        self.weight: float = 1.0
        self.suffix = ""
        self.muted = False
        self.values: dict[str, Any] = {}  # name -> last value as a number or tensor: what callback_metrics shows
        self.checked = ""

    def log(
        self, name: str, value: Any, prog_bar: bool, logger: bool, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: str, sync_dist: bool | None, batch_size: float | None,
    ) -> None:  # fmt: skip
        """Record one scalar; see `Module.log`."""
        if self.muted:
            return
        if self.suffix:
            name = name + self.suffix
        slot = self.slots.get(name)
        if slot is None:
            slot = self._new(name, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist)
        if isinstance(value, Tensor):
            if value.ndim and value.numel() != 1:
                raise ConfigurationError(
                    f"log({name!r}) got a tensor of shape {tuple(value.shape)}; a metric is one number. Reduce it "
                    "first, for instance with .mean()."
                )
            # a leaf may be a parameter or a buffer, which later updates overwrite
            value = value.detach().clone() if value.is_leaf else value.detach()
        elif not isinstance(value, (int, float)):
            raise ConfigurationError(f"log({name!r}) got {value!r}; expected a number or a 0-dim tensor.")
        if slot.on_step:
            slot.last = value
            slot.touched = True
        if slot.on_epoch:
            slot.pending.append(value)
            slot.weights.append(self.weight if batch_size is None else batch_size)
            if len(slot.pending) == FOLD_EVERY:
                slot.fold()

    def _new(
        self, name: str, prog_bar: bool, logger: bool, on_step: bool | None, on_epoch: bool | None, fx: str,
        sync: bool | None,
    ) -> Slot:  # fmt: skip
        if self.defaults is None:
            raise ConfigurationError(f"log({name!r}) was called in a hook that belongs to no step and no epoch.")
        if fx not in REDUCTIONS:
            raise ConfigurationError(f"log({name!r}, reduce_fx={fx!r}): allowed are {', '.join(REDUCTIONS)}.")
        step = self.defaults[0] if on_step is None else on_step
        epoch = self.defaults[1] if on_epoch is None else on_epoch
        if not step and not epoch:
            raise ConfigurationError(f"log({name!r}, on_step=False, on_epoch=False) would record nothing.")
        slot = self.slots[name] = Slot(name, prog_bar, logger, step, epoch, fx, bool(sync))
        return slot

    def step_row(self) -> dict[str, float]:
        """The values logged for steps since the last row, with one transfer from the device; resets ``touched``."""
        slots = [s for s in self.slots.values() if s.touched]
        if any(s.sync for s in slots):
            self._average_steps([s for s in slots if s.sync])
        row = dict(zip((s.step_name for s in slots), read([s.last for s in slots]), strict=True))
        self.values.update(row)
        for slot in slots:
            slot.touched = False
        return {s.step_name: row[s.step_name] for s in slots if s.logger}

    def _average_steps(self, slots: list[Slot]) -> None:
        names = sorted(s.name for s in slots)
        everyone = self._check_names(names)
        if everyone is not None:
            raise TrivetError(f"ranks log different step metrics with sync_dist=True: by rank {everyone}.")
        by_name = {s.name: s for s in slots}
        packed = stack([by_name[name].last for name in names])
        if self.group.world.world_size > 1:
            packed = packed.to(self.group.device)
            torch.distributed.all_reduce(packed)  # all ranks, which log the same names
            packed /= self.group.world.world_size
        for name, value in zip(names, packed.unbind(), strict=True):
            by_name[name].last = value

    def epoch_row(self, *, reset: bool = True) -> dict[str, float]:
        """The epoch's values, reduced over all ranks in one collective per kind; all ranks call it together."""
        slots = sorted((s for s in self.slots.values() if s.on_epoch), key=lambda s: s.name)
        for slot in slots:
            slot.fold()
        slots = self._agree([s for s in slots if s.total is not None])
        row = dict(zip((s.epoch_name for s in slots), self._reduce(slots), strict=True))
        self.values.update(row)
        if reset:
            for slot in slots:
                slot.clear()
        return row

    def _reduce(self, slots: list[Slot]) -> list[float]:
        if not slots:
            return []
        totals = stack([s.total for s in slots])
        if self.group.world.world_size > 1:
            totals = totals.to(self.group.device)
        weights = torch.tensor([s.weight for s in slots], dtype=totals.dtype, device=totals.device)
        if self.group.world.world_size > 1:
            is_extreme = torch.tensor([s.fx in ("min", "max") for s in slots], device=totals.device)
            sign = torch.tensor(
                [-1.0 if s.fx == "min" else 1.0 for s in slots], dtype=totals.dtype, device=totals.device
            )
            sums = torch.cat([totals.masked_fill(is_extreme, 0.0), weights])
            torch.distributed.all_reduce(sums)  # all ranks, which log the same names
            if any(s.fx in ("min", "max") for s in slots):
                extremes = totals * sign
                torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX)  # all ranks
                extremes = extremes * sign
                totals = torch.where(is_extreme, extremes, sums[: len(slots)])
            else:
                totals = sums[: len(slots)]
            weights = sums[len(slots) :]
        means = torch.tensor([s.fx == "mean" for s in slots], device=totals.device)
        result = torch.where(means, totals / weights, totals)
        return [float(v) for v in result.tolist()]

    def _check_names(self, names: list[str]) -> list[list[str]] | None:
        """None where all ranks have the same names, else everybody's. All ranks take part in comparing a digest."""
        if self.group.world.world_size == 1:
            return None
        digest = int.from_bytes(hashlib.blake2b(json.dumps(names).encode(), digest_size=7).digest(), "big")
        mine = torch.tensor([digest, -digest], dtype=torch.int64, device=self.group.device)
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)  # all ranks
        highest, lowest = mine.tolist()
        if highest == -lowest:
            return None
        return [json.loads(text) for text in self.group.exchange(f"metrics/{self.stage}", json.dumps(names))]

    def _agree(self, slots: list[Slot]) -> list[Slot]:
        """Raise on all ranks when they logged different names; a rank that had no batch at all joins with nothing."""
        everyone = self._check_names([f"{s.fx} {s.name}" for s in slots])
        if everyone is None:
            return slots
        union = sorted({entry for entries in everyone for entry in entries}, key=lambda entry: entry.split(" ", 1)[1])
        missing = [
            f"rank {rank} did not log {[e.split(' ', 1)[1] for e in union if e not in entries]}"
            for rank, entries in enumerate(everyone)
            if entries and len(entries) != len(union)
        ]
        if missing:
            raise TrivetError(
                f"ranks log different metrics in {self.stage}: {'; '.join(missing)}. A value that is reduced over "
                "ranks must be logged on all of them, or with on_step=True, on_epoch=False."
            )
        if slots:
            return slots
        neutral = {"min": float("inf"), "max": float("-inf")}
        for entry in union:
            fx, name = entry.split(" ", 1)
            slot = self.slots.setdefault(name, Slot(name, False, True, False, True, fx, False))
            slot.total = torch.tensor(neutral.get(fx, 0.0), dtype=torch.float64, device=self.group.device)
        return [self.slots[entry.split(" ", 1)[1]] for entry in union]

    def state_dict(self) -> dict[str, Any]:
        """The accumulators of the running epoch, of all ranks, as plain numbers. All ranks call it; no collective.

        Pending values stay apart, so that a save changes no sum.
        """
        totals = read([0.0 if s.total is None else s.total for s in self.slots.values()])
        mine = {
            name: {
                "options": [s.prog_bar, s.logger, s.on_step, s.on_epoch, s.fx, s.sync], "weight": s.weight,
                "total": None if s.total is None else total, "pending": read(s.pending), "weights": s.weights,
            }
            for (name, s), total in zip(self.slots.items(), totals, strict=True)
        }  # fmt: skip
        return {"ranks": [json.loads(text) for text in self.group.exchange(f"state/{self.stage}", json.dumps(mine))]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back this rank's share; at another world size the shares are dealt out and joined."""
        world = self.group.world
        for share in state.get("ranks", [])[world.rank :: world.world_size]:
            for name, v in share.items():
                slot = Slot(name, *v["options"])
                slot.total = None if v["total"] is None else torch.tensor(v["total"], dtype=torch.float64)
                slot.weight, slot.pending, slot.weights = v["weight"], list(v["pending"]), list(v["weights"])
                if name in self.slots:
                    self.slots[name].join(slot)
                else:
                    self.slots[name] = slot

    def shown(self) -> dict[str, float]:
        """The newest value of each metric that goes on the progress bar."""
        slots = [s for s in self.slots.values() if s.prog_bar]
        live = {s.step_name: s.last for s in slots if s.on_step and s.last is not None}
        done = {s.epoch_name: self.values[s.epoch_name] for s in slots if s.on_epoch and s.epoch_name in self.values}
        return dict(zip((*live, *done), read([*live.values(), *done.values()]), strict=True))

    def newest(self) -> dict[str, float]:
        """The newest value of every metric."""
        live = {s.step_name: s.last for s in self.slots.values() if s.on_step and s.last is not None}
        merged = {**self.values, **live}
        return dict(zip(merged, read(list(merged.values())), strict=True))


def read(values: list[Any]) -> list[float]:
    """Numbers and 0-dim tensors as floats, with one transfer per device kind."""
    return [float(v) for v in stack(values).tolist()] if values else []
