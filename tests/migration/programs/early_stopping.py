"""EarlyStopping with ModelCheckpoint: training ends when the metric gets worse, and the best weights are tested."""

import json
import tempfile
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.callbacks.early_stopping import EarlyStopping
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Polynomial(LightningModule):
    """Fits few noisy points with many powers, so that it overfits at some time."""

    def __init__(self, degree: int = 9, lr: float = 0.3):
        super().__init__()
        self.save_hyperparameters("degree", "lr")
        self.layer = nn.Linear(degree + 1, 1)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return self.layer(x ** torch.arange(self.hparams.degree + 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)]


def points(count, seed):
    own = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=own) * 2 - 1
    return TensorDataset(x, torch.sin(3 * x) + 0.4 * torch.randn(count, 1, generator=own))


def main():
    seed_everything(0)
    with tempfile.TemporaryDirectory() as folder:
        stop = EarlyStopping(monitor="val_loss", mode="min", patience=3, min_delta=0.0)
        save = ModelCheckpoint(folder, filename="best-{val_loss:.4f}", monitor="val_loss", mode="min", save_top_k=1)
        rates = LearningRateMonitor(logging_interval="epoch")
        trainer = Trainer(
            max_epochs=60,
            accelerator="cpu",
            devices=1,
            log_every_n_steps=1,
            callbacks=[stop, save, rates],
            logger=CSVLogger(folder, name="logs"),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Polynomial()
        trainer.fit(model, DataLoader(points(12, seed=1), batch_size=6), DataLoader(points(40, seed=2), batch_size=40))
        stopped_epoch = stop.stopped_epoch
        last = {name: trainer.callback_metrics[name].item() for name in ("train_loss", "val_loss")}
        tested = trainer.test(
            dataloaders=DataLoader(points(40, seed=3), batch_size=20), ckpt_path="best", verbose=False
        )
        best = Polynomial.load_from_checkpoint(save.best_model_path)
        rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
        return {
            "stopped_epoch": stopped_epoch,
            "best_score": stop.best_score.item(),
            "best_model_score": save.best_model_score.item(),
            "name": Path(save.best_model_path).name.removesuffix(".ckpt"),
            "epochs": trainer.current_epoch,
            "last": last,
            "tested": tested,
            "weights": best.layer.weight.tolist(),
            "logged": "val_loss" in rows[0] and len(rows) > 2,
        }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()))
