"""Plugins with one mistake each, and a right one that is written from the public base class alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from trivet import gradients
from trivet.plugins import MicroBatch, StepResult, Strategy
from trivet.precision.mixed import BF16Mixed
from trivet.strategies.ddp import DDP


class FromTheBaseClass(Strategy):
    """Right: the base class's defaults are a complete data-parallel strategy."""


class ComputesInFP32(BF16Mixed):
    """Says bfloat16 and does nothing."""

    def forward_context(self, device_type: str) -> None:
        return None


class DoesNotReduce(FromTheBaseClass):
    """Every rank trains on its own samples."""

    def reduce_(self, parameters: Any) -> None:
        pass


class ClipsByItsOwnNorm(FromTheBaseClass):
    """Each rank clips its own gradients, before they are averaged."""

    def reduce_(self, parameters: Any) -> None:
        clip = self.context.clip
        if clip is not None:
            self.norm = gradients.clip_(parameters, clip.value, clip.algorithm)
        super().reduce_(parameters)

    def clip_(self, parameters: Any, clip: Any) -> Any:
        return self.norm


class TakesTheMeanOfMeans(DDP):
    """Averages over ranks and micro-batches as if all held as many samples."""

    def one_batch(self, root: nn.Module, micro: MicroBatch, scale: Any) -> None:
        weight, micro.weight = micro.weight, 1 / self.context.accumulate
        super().one_batch(root, micro, scale)
        micro.weight = weight


class SaysThatSkippedUpdatesWereApplied(DDP):
    """So the schedule and the counter move."""

    def optimizer_step(self, *args: Any, **options: Any) -> StepResult:
        return replace(super().optimizer_step(*args, **options), applied=True)


class KeepsTheOldWrapper(DDP):
    """Does not notice that a parameter was unfrozen."""

    def refresh(self, root: nn.Module) -> nn.Module:
        return root


class JudgesOverflowAlone(FromTheBaseClass):
    """Each rank decides by its own gradients, before they are averaged, whether the update is skipped."""

    def optimizer_step(self, root: nn.Module, optimizers: Any, *, scaler: Any, **options: Any) -> StepResult:
        if scaler is not None and not scaler.unscale_(gradients.of(optimizers), agree=lambda flag: flag):
            self.reduce_(gradients.parameters(optimizers))
            return StepResult(applied=False)
        return super().optimizer_step(root, optimizers, scaler=None, **options)
