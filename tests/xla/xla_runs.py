"""What the tests of XLA train, and the tasks of their workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.layout import whole

SAVED_AT, UPDATES, SAMPLES, BATCH_SIZE = 3, 6, 40, 8
SHARDED = {"name": "xla-fsdp", "min_size": 8}


class Tied(trivet.Module):
    """Tied weights, a buffer, a scalar and shapes that four devices do not share evenly."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.wide, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.randn(6))
        self.path = path
        self.weights: dict[int, dict[str, Tensor]] = {}  # after each update

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        token, target = batch
        x = self.norm(torch.tanh(self.wide(self.embedding(token) + self.shift)))
        return nn.functional.cross_entropy(self.head(self.scale * x), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def on_update_end(self) -> None:
        update, engine = self.trainer.progress.update, self._attached().engine
        held = engine.strategy.state_dict(engine.module)
        self.weights[update] = {name: whole(tensor).detach().cpu().clone() for name, tensor in held.items()}
        if update == SAVED_AT and self.path is not None:
            self.trainer.save_checkpoint(self.path)


def fit(
    strategy: Any, accelerator: str, devices: int, path: Path | None, origin: Path | None
) -> dict[int, dict[str, Tensor]]:
    """Task: one fit, which saves on its way or goes on from a checkpoint; the weights after each update."""
    tokens = torch.randint(11, (2, SAMPLES), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5 if origin is None else 99)  # the checkpoint's seed rules
    trainer = trivet.Trainer(
        accelerator=accelerator, strategy=strategy, devices=devices, max_steps=UPDATES, logger=False,
        accumulate_grad_batches=2 // devices, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Tied(path)
    trainer.fit(module, DataLoader(TensorDataset(*tokens), BATCH_SIZE // 2, shuffle=True), ckpt_path=origin)
    assert module.head.weight is module.embedding.weight or accelerator == "cpu"
    return module.weights
