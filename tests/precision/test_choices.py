"""Options of the usual precisions: how float32 products are made, losses that are not scaled, gradients on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet import registry
from trivet.capabilities import resolve
from trivet.errors import ConfigurationError
from trivet.runtime import Runtime


def plan(precision: Any) -> str:
    return " ".join(str(resolve(strategy="single", accelerator="cpu", precision=precision).plan).split())


def test_choices_stand_in_the_plan() -> None:
    assert "fp32 (trivet 0.1.0) with matmul='high'" in plan({"name": "fp32", "matmul": "high"})
    text = plan({"name": "fp16", "scale": False, "reduce": "float16"})
    assert "scale=False, reduce='float16'" in text
    assert "reduction float16 loss scaling none" in text
    assert "reduction bfloat16" in plan({"name": "bf16", "reduce": "bfloat16"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "fp32", "matmul": "tf32"}, r"fp32: matmul='tf32' is unknown; allowed are highest .* high \(TF32"),
        ({"name": "bf16", "reduce": "float16"}, "reduce='float16' is unknown; allowed are float32, bfloat16"),
        ({"name": "fp16", "reduce": "bfloat16"}, "reduce='bfloat16' is unknown; allowed are float32, float16"),
    ],
)
def test_choices_that_do_not_exist(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        registry.make("precision", options)


def test_float16_without_scaling_wants_no_scaling() -> None:
    plugin = registry.make("precision", {"name": "fp16", "scale": False}).plugin
    assert plugin.scaling is None
    assert not plugin.needs.strategy
    assert plugin.policy.compute == torch.float16


def setting() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


class Asks(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 1), set[Any]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[0]).sum()
        loss.register_hook(lambda grad: self.seen.add(("backward", *setting())))
        self.seen.add(("forward", *setting()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("matmul", ["highest", "high", "medium", None])
def test_float32_products_hold_for_the_run_and_are_put_back(matmul: str | None) -> None:
    before, module = setting(), Asks()
    trainer = trivet.Trainer(
        accelerator="cpu", precision={"name": "fp32", "matmul": matmul}, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(2, 2))))
    expected = before if matmul is None else (matmul, matmul != "highest")
    assert module.seen == {("forward", *expected), ("backward", *expected)}
    assert setting() == before
    runtime = Runtime(accelerator="cpu", precision={"name": "fp32", "matmul": matmul})
    assert runtime.launch(lambda runtime: setting()) == expected
    assert setting() == before
