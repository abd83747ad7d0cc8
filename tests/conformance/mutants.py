"""Plugins with one mistake each, and a right one that is written from the public base class alone."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from trivet import gradients
from trivet.accelerators.cpu import CPU
from trivet.plugins import MicroBatch, Needs, Policy, StepResult, Strategy
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


class SumsGradients(FromTheBaseClass):
    """Does not divide by the number of ranks."""

    def reduce_(self, parameters: Any) -> None:
        super().reduce_(parameters)
        gradients.multiply_([param.grad for param in parameters], self.context.world.world_size)


class SendsWhatItHas(FromTheBaseClass):
    """Gradients travel in their own dtype, whatever the policy says."""

    def reduce_(self, parameters: Any) -> None:
        gradients.average_(parameters, self.context.world)


class SendsWhatItHasUnseen(SendsWhatItHas):
    """The same, and no check of the first update looks."""

    own_wire = True


class AsksNobody(FromTheBaseClass):
    """Each rank sends the gradients that it has itself."""

    def reduce_(self, parameters: Any) -> None:
        for param in parameters:
            if param.grad is not None and self.context.world.world_size > 1:
                sent = param.grad.to(self.context.policy.reduce)
                dist.all_reduce(sent)
                param.grad.copy_(sent / self.context.world.world_size)


class WeighsSkippedSamples(FromTheBaseClass):
    """Averages over the ranks that have something to add, which the core allows for already."""

    def reduce_(self, parameters: Any) -> None:
        adding = torch.tensor(float(any(param.grad is not None for param in parameters)))
        if self.context.world.world_size > 1:
            dist.all_reduce(adding)
        super().reduce_(parameters)
        gradients.multiply_([p.grad for p in parameters], self.context.world.world_size / float(adding))


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


class LocalSGD(FromTheBaseClass):
    """Right, and not like one process: ranks train apart, and average parameters and optimizer state now and then."""

    def __init__(self, period: int = 3) -> None:
        self.period = period
        self.updates = 0

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"several_processes", "accumulation"})

    def reduce_(self, parameters: Any) -> None:
        """Nothing: gradients stay apart."""

    def optimizer_step(self, root: nn.Module, optimizers: Any, **options: Any) -> StepResult:
        result = super().optimizer_step(root, optimizers, **options)
        self.updates += 1
        if self.updates % self.period == 0:
            self.meet([t.data for t in root.parameters()])
            self.meet([t for o in optimizers for s in o.state.values() for t in s.values() if getattr(t, "dim", int)()])
        return result

    def meet(self, tensors: list[Tensor]) -> None:
        """Average in place; all ranks."""
        if self.context.world.world_size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)
                tensor /= self.context.world.world_size


class LocalSGDThatNeverMeets(LocalSGD):
    """Every rank trains on its own samples, for ever."""

    def meet(self, tensors: list[Tensor]) -> None:
        pass


class LocalSGDOfOneRank(LocalSGD):
    """Everybody takes over what rank 0 has learned from its own samples."""

    def meet(self, tensors: list[Tensor]) -> None:
        if self.context.world.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)


class CoresAsDevices(CPU):
    """Right: keeps books about CPU tensors, as if they were a device's."""

    device_type = "cpu"
    moves_batches = True

    def to_device(self, batch: Any, device: torch.device) -> Any:
        return apply_to_collection(batch, Tensor, torch.clone)


class OffersWhatItCannotDo(CoresAsDevices):
    """There is no product in float8 on the CPU."""

    @property
    def offers(self) -> frozenset[str]:
        return super().offers | {"dtype:float8_e4m3fn"}


class LosesTheNesting(CoresAsDevices):
    """Knows lists and nothing else."""

    def to_device(self, batch: Any, device: torch.device) -> Any:
        return [part.clone() for part in batch]


class ForgetsTheBatch(CoresAsDevices):
    """Moves what it is asked to move into another dtype."""

    def to_device(self, batch: Any, device: torch.device) -> Any:
        return apply_to_collection(batch, Tensor, Tensor.float)


class SaysMemoryInWords(CoresAsDevices):
    """Numbers are wanted."""

    def memory(self) -> Any:
        return {"allocated": "much"}


class ConnectsNobody(CoresAsDevices):
    """Offers collectives without a backend."""

    collective_backend = None


class StoresFP32(BF16Mixed):
    """Says that it stores bfloat16."""

    @property
    def policy(self) -> Policy:
        return Policy(param=torch.bfloat16, compute=torch.bfloat16)

    def convert(self, module: nn.Module) -> nn.Module:
        return module


class AsksForNothing(BF16Mixed):
    """Computes in bfloat16 on devices that do not have it."""

    @property
    def needs(self) -> Needs:
        return Needs()


class HidesAnOption(FromTheBaseClass):
    """Does not keep its constructor's argument."""

    def __init__(self, period: int = 3) -> None:
        self._hidden = period


class OffersASet(FromTheBaseClass):
    """Not a frozenset."""

    @property
    def offers(self) -> Any:
        return set(super().offers)


class SetsTheEnvironment(FromTheBaseClass):
    """Changes the process that made it."""

    def __init__(self) -> None:
        os.environ["MADE_BY_A_PLUGIN"] = str(len(os.environ.get("MADE_BY_A_PLUGIN", "")) + 1) * 2
