"""A data module with several loaders: two training sets in a dict, two validation sets, and hyperparameters."""

import json

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset, random_split


class SineData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8, frequency: float = 2.0):
        super().__init__()
        self.save_hyperparameters()
        self.log_of_calls = []

    def prepare_data(self):
        self.log_of_calls.append("prepare_data")

    def setup(self, stage: str):
        self.log_of_calls.append(["setup", stage == "fit", stage == "test"])
        x = torch.linspace(-1, 1, 80).unsqueeze(1)
        y = torch.sin(self.hparams.frequency * x)
        own = torch.Generator().manual_seed(42)
        parts = random_split(TensorDataset(x, y), [32, 16, 20, 12], generator=own)
        self.first, self.second, self.val, self.rest = parts

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        loaders = {
            "first": DataLoader(self.first, batch_size=self.hparams.batch_size, sampler=SequentialSampler(self.first)),
            "second": DataLoader(self.second, batch_size=4),
        }
        return CombinedLoader(loaders, mode="min_size")

    def val_dataloader(self) -> EVAL_DATALOADERS:
        return [DataLoader(self.val, batch_size=8), DataLoader(self.rest, batch_size=4)]

    def test_dataloader(self) -> EVAL_DATALOADERS:
        return DataLoader(self.rest, batch_size=5)

    def teardown(self, stage: str):
        self.log_of_calls.append(["teardown", stage == "fit"])


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        (x1, y1), (x2, y2) = batch["first"], batch["second"]
        loss = F.mse_loss(self.net(x1), y1) + 0.5 * F.mse_loss(self.net(x2), y2)
        self.losses.append(loss.item())
        self.log("loss", loss, batch_size=len(x1) + len(x2))
        return loss

    def on_train_start(self):
        self.batches = self.trainer.num_training_batches

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val", F.mse_loss(self.net(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test", F.l1_loss(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    pl.seed_everything(5)
    data, model = SineData(frequency=3.0), Regressor()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    validated = trainer.validate(model, data, verbose=False)
    tested = trainer.test(model, datamodule=data, verbose=False)
    return {
        "losses": model.losses,
        "metrics": metrics,
        "validated": validated,
        "tested": tested,
        "calls": data.log_of_calls,
        "batches": model.batches,
        "hparams": dict(data.hparams),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()))
