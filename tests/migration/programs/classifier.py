"""A classifier on two interleaved half circles: fit, validate, test, predict."""

import json

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def half_circles(count, seed):
    noise = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, generator=noise) * torch.pi
    label = torch.arange(count) % 2
    x = torch.where(label == 0, torch.cos(angle), 1 - torch.cos(angle))
    y = torch.where(label == 0, torch.sin(angle), 0.5 - torch.sin(angle))
    points = torch.stack([x, y], dim=1) + 0.1 * torch.randn(count, 2, generator=noise)
    return TensorDataset(points, label)


class Classifier(pl.LightningModule):
    def __init__(self, width: int = 16, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x)

    def _shared(self, batch):
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y), (logits.argmax(dim=1) == y).float().mean()

    def training_step(self, batch, batch_idx):
        loss, acc = self._shared(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return {"loss": loss, "acc": acc}

    def validation_step(self, batch, batch_idx):
        loss, acc = self._shared(batch)
        self.log_dict({"val_loss": loss, "val_acc": acc}, prog_bar=True)

    def test_step(self, batch, batch_idx):
        loss, acc = self._shared(batch)
        self.log("test_loss", loss)
        self.log("test_acc", acc)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).softmax(dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


class History(pl.Callback):
    def __init__(self):
        self.steps, self.epochs = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(outputs["loss"].item())

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(
            {
                name: value.item()
                for name, value in trainer.callback_metrics.items()
                if "_" in name and "grad" not in name
            }
        )


def main():
    pl.seed_everything(7, workers=True)
    model, history = Classifier(), History()
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        precision="32-true",
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[history],
    )
    train = DataLoader(half_circles(96, seed=1), batch_size=16, shuffle=False)
    val = DataLoader(half_circles(40, seed=2), batch_size=16)
    trainer.fit(model, train, val)
    validated = trainer.validate(model, dataloaders=val, verbose=False)
    tested = trainer.test(model, DataLoader(half_circles(40, seed=3), batch_size=16), verbose=False)
    predicted = trainer.predict(model, DataLoader(half_circles(20, seed=4), batch_size=8))
    return {
        "steps": history.steps,
        "epochs": history.epochs,
        "validated": validated,
        "tested": tested,
        "predicted": torch.cat(predicted).tolist(),
        "global_step": trainer.global_step,
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()))
