"""Fused optimizers, which step all parameters in one kernel: clipping and loss scaling come before, as for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trivet
from ranks import run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(trivet.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.net = fused, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.ends: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[0].roll(1, -1)).pow(2).mean()
        return loss * float("inf") if self.trainer.progress.update == 2 and not self.trainer.progress.skipped else loss

    def on_update_end(self) -> None:
        self.ends += [float(self.trainer.callback_metrics.get("grad_norm", 0.0))]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


def trained(strategy: str, devices: int, fused: bool) -> tuple[list[float], dict[str, Tensor], int]:
    """Task: six updates in float16 with a clipped norm, the third of which overflows and is skipped."""
    torch.manual_seed(0)
    module, data = Net(fused), DataLoader(TensorDataset(torch.randn(48, 8)), 8 // devices)
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, precision={"name": "fp16-mixed", "initial": 1024.0},
        max_epochs=1, gradient_clip_val=0.05, logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return module.ends, {name: value.clone() for name, value in module.state_dict().items()}, trainer.progress.skipped


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("zero2", 2), ("fsdp", 2)])
def test_fused_steps_are_clipped_and_skipped_like_others(strategy: str, devices: int) -> None:
    usual, fused = run(devices, trained, strategy, devices, False), run(devices, trained, strategy, devices, True)
    for (norms, weights, skipped), (fused_norms, fused_weights, fused_skipped) in zip(usual, fused, strict=True):
        assert skipped == fused_skipped == 1
        assert max(norms) > 0.05
        torch.testing.assert_close(fused_norms, norms, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(fused_weights, weights, rtol=1e-4, atol=1e-6)
