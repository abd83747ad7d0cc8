"""Mixed precision is autocast's table for the device: products in the low dtype, losses in float32, and the rest as the
table has it. The CPU's leaves softmax and norms in the dtype that they get; `tests/device` has CUDA's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trivet
from ranks import run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trivet import registry

LOW = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16, "fp8-mixed": torch.bfloat16}


def dtypes(name: str) -> dict[str, torch.dtype]:
    """What operations give of low inputs, within the precision's context."""
    low = LOW[name]
    x, target, labels = torch.randn(8, 16, dtype=low), torch.randn(8, 16), torch.arange(8)
    norm, layer = nn.LayerNorm(16), nn.Linear(16, 16)
    with registry.make("precision", name).plugin.forward_context("cpu"):
        return {
            "linear": layer(x).dtype, "matmul": (x @ x.T).dtype, "product of float32": (target @ target.T).dtype,
            "mse_loss": F.mse_loss(x, target).dtype, "cross_entropy": F.cross_entropy(x, labels).dtype,
            "l1_loss": F.l1_loss(x, target).dtype, "kl_div": F.kl_div(x, target, reduction="sum").dtype,
            "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits(x, target.sigmoid()).dtype,
            "prod": x.prod().dtype, "softmax of float32": target.softmax(-1).dtype,
            "layer_norm of float32": norm(target).dtype, "softmax": x.softmax(-1).dtype, "layer_norm": norm(x).dtype,
        }  # fmt: skip


@pytest.mark.parametrize("name", LOW)
def test_the_table(name: str) -> None:
    low, found = LOW[name], dtypes(name)
    products = {"linear", "matmul", "product of float32"}
    as_given = {"softmax", "layer_norm"}  # on the CPU
    assert {op for op, dtype in found.items() if dtype == low} == products | as_given
    assert {dtype for op, dtype in found.items() if op not in products | as_given} == {torch.float32}


class Net(trivet.Module):
    """A norm between two layers, a softmax, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.seen: dict[str, torch.dtype] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.first(batch[0])
        scores = self.second(self.norm(hidden.float()))
        loss = F.cross_entropy(scores, batch[1])
        parts = {"first": hidden, "softmax of float32": scores.float().softmax(-1), "second": scores, "loss": loss}
        self.seen |= {name: tensor.dtype for name, tensor in parts.items()}
        self.seen |= {f"norm.{name}": tensor.dtype for name, tensor in self.norm.state_dict().items()}
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(strategy: str, devices: int, precision: str) -> dict[str, torch.dtype]:
    """Task: the dtypes that a run saw."""
    data = TensorDataset(torch.randn(16, 8), torch.arange(16) % 8)
    module = Net()
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, precision=precision, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, 4))
    return module.seen


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("fsdp", 2)])
def test_norms_and_losses_are_float32_in_a_run(strategy: str, devices: int, precision: str) -> None:
    for seen in run(devices, trained, strategy, devices, precision):
        assert {seen["first"], seen["second"]} == {LOW[precision]}
        assert {
            dtype for name, dtype in seen.items() if name not in ("first", "second", "norm.num_batches_tracked")
        } == {torch.float32}
