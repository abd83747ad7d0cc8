"""Training in two parts: two epochs, a checkpoint, and three more in a new Trainer."""

import json
import tempfile

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.02):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))
        self.seen = 0
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.smooth_l1_loss(self.net(x), y)
        self.seen += len(x)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step", "frequency": 1}}


class Counter(pl.Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


def train(folder, epochs, ckpt_path=None):
    pl.seed_everything(13)
    own = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=own)
    data = DataLoader(TensorDataset(x, (x**2).sum(dim=1, keepdim=True)), batch_size=8)
    save, counter = ModelCheckpoint(dirpath=folder, save_last=True), Counter()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[save, counter],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Net()
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return trainer, model, save, counter


def main():
    with tempfile.TemporaryDirectory() as folder:
        first, begun, save, _ = train(folder, epochs=2)
        second, model, _, counter = train(folder, epochs=5, ckpt_path=save.last_model_path)
        return {
            "begun": begun.losses,
            "resumed": model.losses,
            "seen": model.seen,
            "batches": counter.batches,
            "steps": [first.global_step, second.global_step],
            "epochs": [first.current_epoch, second.current_epoch],
            "loss": second.callback_metrics["loss_epoch"].item(),
        }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()))
