"""Metric objects of torchmetrics: updated in the steps, computed and reset at the end of each epoch."""

import json

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningModule):
    def __init__(self, num_classes: int = 3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, num_classes))
        scores = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.Accuracy(task="multiclass", num_classes=num_classes),
                "f1": torchmetrics.F1Score(task="multiclass", num_classes=num_classes, average="macro"),
            }
        )
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=num_classes)
        self.val_scores = scores.clone(prefix="val_")
        self.mean_loss = torchmetrics.MeanMetric()
        self.epochs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=False)
        self.mean_loss.update(loss, len(x))
        self.log("train_loss", self.mean_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_scores.update(self.net(x), y)
        self.log_dict(self.val_scores, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.epochs.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main():
    pl.seed_everything(9)
    own = torch.Generator().manual_seed(9)
    x = torch.randn(75, 4, generator=own)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long() + (x[:, 2] > 0.8).long()
    model = Digits()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(x, y)
    trainer.fit(model, DataLoader(data, batch_size=16), DataLoader(data, batch_size=20))
    final = {name: value.item() for name, value in trainer.callback_metrics.items()}
    validated = trainer.validate(model, DataLoader(data, batch_size=32), verbose=False)
    return {"epochs": model.epochs, "final": final, "validated": validated}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()))
