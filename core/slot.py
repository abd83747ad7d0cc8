"""Slot: what one logged name has gathered; nothing in it is read from the device before somebody looks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError

REDUCTIONS: dict[Any, str] = {
    "mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max", torch.mean: "mean", torch.sum: "sum",
    torch.min: "min", torch.max: "max", torch.amin: "min", torch.amax: "max", sum: "sum", min: "min", max: "max",
}  # fmt: skip
FOLD_EVERY = 128  # pending values of one metric, so that memory does not grow with the run


def reduction(name: str, reduce_fx: str | Callable[..., Any]) -> str:
    """Which of mean, sum, min and max ``reduce_fx`` stands for: a name or torch's function."""
    try:
        return REDUCTIONS[reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx]
    except (KeyError, TypeError):
        raise ConfigurationError(
            f"log({name!r}, reduce_fx={reduce_fx!r}): allowed are mean, sum, min, max, by name or as torch's function. "
            "For another reduction log an object with update, compute and reset, such as those of torchmetrics."
        ) from None


class Slot:
    """One metric of one stage, as one kind of hook logs it. ``local``: rank 0's own, see ``rank_zero_only``."""

    __slots__ = (
        "entry", "fx", "last", "last_weight", "local", "logger", "name", "on_epoch", "on_step", "options", "pending",
        "prog_bar", "special", "steps", "suffix", "sync", "total", "touched", "weight", "weights",
    )  # fmt: skip

    def __init__(
        self, name: str, suffix: str, place: str, prog_bar: bool, logger: bool, on_step: bool, on_epoch: bool, fx: str,
        sync: bool | str, local: bool,
    ) -> None:  # fmt: skip
        self.name, self.suffix, self.prog_bar, self.logger = name, suffix, prog_bar, logger
        self.on_step, self.on_epoch, self.fx, self.sync, self.local = on_step, on_epoch, fx, sync, local
        self.options: tuple[Any, ...] | None = None  # as `Module.log` got them; None: not yet, after a resume
        self.last: Any = None
        self.touched = False  # whether a step's value waits to be written
        self.steps: list[Any] | None = [] if on_step and place == "evaluation" else None  # the values of all steps
        self.special = self.steps is not None or bool(sync)
        self.last_weight = 1.0
        # by what ranks compare what they logged; `absent` reads it
        flags = f"{place} {prog_bar:d}{logger:d}{on_step:d}{'?' if sync == 'sparse' else ''}"
        self.entry = f"{fx} {flags} {name}{suffix}"
        self.clear()

    def clear(self) -> None:
        self.pending: list[Any] = []
        self.weights: list[float] = []
        self.total: Tensor | None = None  # float64: weighted sum, or the extreme
        self.weight = 0.0

    @property
    def full_name(self) -> str:
        return self.name + self.suffix

    @property
    def step_name(self) -> str:
        return f"{self.name}_step{self.suffix}" if self.on_epoch else self.name + self.suffix

    @property
    def epoch_name(self) -> str:
        return f"{self.name}_epoch{self.suffix}" if self.on_step else self.name + self.suffix

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
            parts = values if self.fx == "sum" else weighted(values, self.weights)
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


SUFFIX = "/dataloader_idx_"


def absent(entry: str) -> Slot:
    """The slot of what only other ranks logged, by their `Slot.entry`: this rank writes the same rows."""
    fx, place, flags, name = entry.split(" ", 3)
    name, mark, number = name.partition(SUFFIX)
    prog_bar, logger, on_step = (flag == "1" for flag in flags[:3])
    return Slot(name, mark + number, place, prog_bar, logger, on_step, True, fx, False, False)


def scalar(name: str, value: Tensor) -> Tensor:
    """One number, as a tensor without dimensions."""
    if value.numel() != 1:
        raise ConfigurationError(
            f"log({name!r}) got a tensor of shape {tuple(value.shape)}; a metric is one number. Reduce it first, for "
            "instance with .mean()."
        )
    return value.reshape(())


def weighted(values: Tensor, weights: list[float]) -> Tensor:
    first = weights[0]
    if all(weight == first for weight in weights):
        return values * first
    factors = torch.tensor(weights, dtype=values.dtype)
    if values.is_cuda:  # from pinned memory the host need not wait for the copy
        factors = factors.pin_memory().to(values.device, non_blocking=True)
    return values * factors.to(values.device)


@functools.cache
def wide(device: torch.device | None) -> torch.dtype:
    """float64, or float32 on a device that has none: Apple's, many of Intel's. Nothing but trying tells."""
    try:
        torch.ones((), dtype=torch.float64, device=device).add(1)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # which are RuntimeErrors, too, and say nothing of float64
        raise
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def stack(values: list[Any]) -> Tensor:
    """Numbers and 0-dim tensors as one float64 tensor (float32 where the device has no float64)."""
    first = values[0]
    if not isinstance(first, Tensor) and not any(isinstance(v, Tensor) for v in values):
        return torch.tensor(values, dtype=torch.float64)
    device = next(v.device for v in values if isinstance(v, Tensor))
    dtype = wide(device)
    kind = getattr(first, "dtype", None)
    if all(isinstance(v, Tensor) and v.dtype is kind and v.device == device for v in values):
        return torch.stack(values).to(dtype)  # two kernels, however many values
    return torch.stack([torch.as_tensor(v, dtype=dtype, device=device) for v in values])


def read(values: list[Any]) -> list[float]:
    """Numbers and 0-dim tensors as floats, with one transfer from the device."""
    return [float(v) for v in stack(values).tolist()] if values else []
