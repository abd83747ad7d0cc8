"""Manual optimization: several optimizers, toggling, clipping, accumulation, fp16, on one and two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.manual import ManualOptimizer


class Pair(trivet.Module):
    """Two layers, each with an optimizer; the second steps in every second batch only."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            assert not any(p.requires_grad for p in self.b.parameters())
            first.zero_grad()
            self.manual_backward(self.b(self.a(x)).square().mean())
            self.clip_gradients(first, gradient_clip_val=0.1)
            first.step()
        if batch_idx % 2 == 0:
            self.toggle_optimizer(second)
            second.zero_grad()
            self.manual_backward(self.b(self.a(x)).abs().mean())
            self.clip_gradients(second, 0.01, "value")
            second.step()
            self.untoggle_optimizer(second)
        assert all(p.requires_grad for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.a.parameters(), 0.5), torch.optim.SGD(self.b.parameters(), 0.5)


def train(strategy: str, batch_size: int, precision: str) -> tuple[dict[str, Tensor], int]:
    data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))
    module, trainer = Pair(), scalar.trainer(strategy=strategy, precision=precision)
    trainer.fit(module, DataLoader(data, batch_size))
    return {name: value.float() for name, value in module.state_dict().items()}, trainer.global_step


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_two_ranks_train_as_one(strategy: str, precision: str) -> None:
    expected, updates = train("single", 8, precision)
    assert updates == 4 if precision == "fp32" else 3  # the first loss scale overflows
    for found, steps in run(2, train, strategy, 4, precision):
        assert steps == updates
        for name, value in found.items():
            bound = 1e-6 if precision == "fp32" else 2e-3
            torch.testing.assert_close(value, expected[name], atol=bound, rtol=bound)


class ByHand(scalar.Scalar):
    """Accumulates three batches by itself."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.w * batch.mean() / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_accumulated_by_hand_an_update_is_a_step() -> None:
    module, trainer = ByHand(), scalar.trainer()
    trainer.fit(module, scalar.loader([3.0] * 6))
    assert trainer.global_step == 2
    assert module.w.item() == -3.0 - 1.5


def test_the_wrapper_is_like_its_optimizer() -> None:
    seen = {}

    class Looks(scalar.Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            seen["type"] = type(optimizer), isinstance(optimizer, torch.optim.Optimizer)
            seen["lr"] = optimizer.param_groups[0]["lr"]
            with optimizer.toggle_model():
                self.manual_backward(self.w * 2, retain_graph=True)
                optimizer.step()

    module = Looks(manual=True)
    scalar.trainer().fit(module, scalar.loader(1))
    assert seen == {"type": (ManualOptimizer, True), "lr": 1.0}
    assert module.w.item() == -2.0


def test_options_of_backward() -> None:
    class Twice(scalar.Scalar):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = (self.w + 1) ** 2
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            optimizer.step()

    module = Twice(manual=True)
    scalar.trainer().fit(module, scalar.loader(1))
    assert module.w.item() == -4.0
