"""The check on the first update sees products without layers, what ranks add up, and where tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import trivet
from ranks import outcomes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.errors import PlanMismatch, RankFailed
from trivet.observed import Observed
from trivet.plugins import Policy
from trivet.precision.mixed import BF16Mixed
from trivet.strategies.single import Single


class Products(trivet.Module):
    """Multiplies by a parameter of its own, outside of any layer."""

    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        self.weight, self.casts = nn.Parameter(torch.randn(4, 4)), casts

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.autocast("cpu", enabled=not self.casts, dtype=torch.bfloat16):
            return (batch[0] @ self.weight).float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(module: trivet.Module, **options: Any) -> None:
    given: dict[str, Any] = {"accelerator": "cpu", "precision": "bf16-mixed", "max_epochs": 1, **options}
    trainer = trivet.Trainer(logger=False, enable_progress_bar=False, enable_checkpointing=False, callbacks=[], **given)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), 2))


def test_products_without_a_layer_are_seen() -> None:
    fit(Products())
    with pytest.raises(PlanMismatch, match=r"matrix products gave \['float32'\], planned bfloat16"):
        fit(Products(casts=True))


class Deep(BF16Mixed):
    """Says that it sends bfloat16."""

    @property
    def policy(self) -> Policy:
        return Policy(torch.float32, torch.bfloat16, torch.bfloat16)


class Shallow(trivet.plugins.Strategy):
    """Averages in float32, whatever the policy says."""

    def reduce_(self, parameters: Any) -> None:
        for param in parameters:
            torch.distributed.all_reduce(param.grad)
            param.grad /= self.context.world.world_size


def sent(strategy: Any, precision: Any) -> str:
    """Task: what the check says of a run over two processes."""
    try:
        fit(Products(), strategy=strategy, devices=2, precision=precision)
    except (PlanMismatch, RankFailed) as error:  # of this rank, or of the one that told first
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", {"name": "ddp", "communication_hook": "fp16"}])
@pytest.mark.parametrize("precision", ["bf16-mixed", {"name": "bf16-mixed", "reduce": "bfloat16"}])
def test_gradients_travel_as_planned(strategy: str | Mapping[str, Any], precision: str | Mapping[str, Any]) -> None:
    assert outcomes(sent, strategy, precision) == ["", ""]


class Counting(Products):
    """Adds up a number of its own over the ranks, in float64."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        torch.distributed.all_reduce(torch.ones(1, dtype=torch.float64))
        return super().training_step(batch, batch_idx)


def counted(strategy: str) -> str:
    """Task: what the check says where few other numbers are added up."""
    try:
        fit(Counting(), strategy=strategy, devices=2)
    except PlanMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])  # zero exchanges gradients on gloo, and adds them up by itself
def test_what_else_is_added_up_is_not_taken_for_gradients(strategy: str) -> None:
    assert outcomes(counted, strategy) == ["", ""]


def test_gradients_that_travel_otherwise_are_told() -> None:
    text = "ranks added up gradients in float32, planned bfloat16"
    for found in outcomes(sent, Shallow(), Deep()):
        assert text in found


class Elsewhere(Single):
    """Says that parameters are somewhere else."""

    def storage_device(self, device: torch.device) -> torch.device:
        return torch.device("meta")


def test_tensors_on_another_device_are_told() -> None:
    with pytest.raises(PlanMismatch) as caught:
        fit(Products(), strategy=Elsewhere())
    assert "parameter 'weight' is on cpu, planned meta" in str(caught.value)
    assert "AdamW keeps 'exp_avg' on cpu, planned meta" in str(caught.value)


def test_what_was_observed() -> None:
    with Observed() as observed:
        layer = nn.Linear(3, 2)
        layer(torch.ones(1, 3)).sum().backward()
        torch.bmm(torch.ones(1, 2, 2, dtype=torch.float64), torch.ones(1, 2, 2, dtype=torch.float64))
    assert set(observed.products) == {torch.float32, torch.float64}
    assert not observed.added
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert observed.products[torch.float64] == 1
