"""A net of uneven layers that is trained with clipping, and what each rank saw: the weights, and the reported norms."""

from __future__ import annotations

from typing import Any

import scalar
import torch
import trivet
from torch import Tensor, nn

CLIP = 0.1


class Net(trivet.Module):
    """Layers of 5 x 3 and 3 x 5, which two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.norms: list[float] = []
        self.whole: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - 1).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    def on_update_end(self) -> None:
        self.norms.append(self.trainer.callback_metrics["grad_norm"])

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        self.whole = {name: strategy.whole(t).detach().clone() for name, t in strategy.state_dict(self).items()}


def train(strategy: Any, devices: int) -> tuple[dict[str, Tensor], list[float]]:
    """Task: three updates."""
    module = Net()
    batches = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    options = {"devices": devices, "gradient_clip_val": CLIP, "max_steps": 3, "global_batch_size": 4}
    trainer = scalar.trainer(strategy=strategy, **options)
    trainer.fit(module, torch.utils.data.DataLoader(batches, 4 // devices))
    return module.whole, module.norms
