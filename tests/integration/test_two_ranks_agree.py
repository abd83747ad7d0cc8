"""What could part two ranks under ddp: schedules on a rank's own number, steps past the run, compressed gradients."""

from __future__ import annotations

import pytest
import torch
import trivet
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from trivet.errors import CheckpointError, ConfigurationError, RankFailed


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Plateau(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    def on_train_end(self):
        rates = self.all_gather(torch.tensor(self.optimizers().param_groups[0]["lr"]))
        weights = self.all_gather(self.layer.weight.detach())
        assert torch.equal(rates[0], rates[-1]), rates
        assert torch.equal(weights[0], weights[-1])


class PastTheRun(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        optimizer.zero_grad()
        self.manual_backward(mse_loss(self.layer(batch[0]), batch[1]))
        optimizer.step()


class PlainBackward(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        mse_loss(self.layer(batch[0]), batch[1]).backward()
        optimizer.step()


class Misspelt(Net):
    def training_step(self, batch, batch_idx):
        return {"los": super().training_step(batch, batch_idx)}


def data(batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)


def trainer(**flags) -> trivet.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
    return trivet.Trainer(accelerator="cpu", **{**quiet, **flags})


def seeded(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind()


def test_a_schedule_on_a_step_metric_keeps_ranks_together() -> None:
    trainer(devices=2, max_epochs=6).fit(seeded(Plateau), data())


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_gradients_are_compressed_by_name(hook: str) -> None:
    plain = seeded(Net)
    trainer().fit(plain, data(8))
    compressed = seeded(Net)
    trainer(devices=2, strategy={"name": "ddp", "communication_hook": hook}).fit(compressed, data())
    assert torch.allclose(plain.layer.weight, compressed.layer.weight, atol=1e-2)


def test_a_manual_step_past_the_run_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"on the optimizer itself\. Take it from self\.optimizers\(\)"):
        trainer().fit(seeded(PastTheRun), data())
    with pytest.raises(RankFailed, match="on the optimizer itself"):
        trainer(devices=2).fit(seeded(PastTheRun), data())


def test_a_plain_backward_under_loss_scaling_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Write self\.manual_backward\(loss\) instead of loss\.backward\(\)"):
        trainer(precision="fp16").fit(seeded(PlainBackward), data())
    trainer().fit(seeded(PlainBackward), data())  # nothing to scale or to weigh


def test_a_step_that_returns_something_else_is_told_so() -> None:
    with pytest.raises(ConfigurationError, match=r"a mapping with the keys \['los'\]; expected the loss"):
        trainer().fit(seeded(Misspelt), data())


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path) -> None:
    first = trainer(max_epochs=1)
    first.fit(seeded(Net), data())
    first.save_checkpoint(tmp_path / "sgd")

    class Adam(Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    with pytest.raises(CheckpointError, match=r"which Adam needs: it was written with another optimizer"):
        trainer().fit(seeded(Adam), data(), ckpt_path=tmp_path / "sgd")
