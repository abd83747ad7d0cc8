"""Manual optimization under autocast, which keeps casts of the weights for as long as its context lasts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader


class TwoForwards(trivet.Module):
    """Sees its output before and after a step that takes the weight from 1 to 0."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.outputs: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(x).mean()
        self.outputs.append(output.item())
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self(batch))
        optimizer.step()
        self(batch)


class WithClosure(TwoForwards):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self(batch) ** 2
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def outputs(module: TwoForwards, precision: str) -> list[float]:
    trainer = trivet.Trainer(
        accelerator="cpu", strategy="single", precision=precision, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.ones(2, 1), 2))
    return module.outputs


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_a_forward_after_a_step_sees_the_new_weights(precision: str) -> None:
    assert outputs(TwoForwards(), precision)[-2:] == [1.0, 0.0]  # before them, fp16-mixed skips an overflow


def test_every_evaluation_of_a_closure_sees_the_moved_weights() -> None:
    seen = outputs(WithClosure(), "bf16-mixed")
    assert len(set(seen)) == len(seen) >= 3
