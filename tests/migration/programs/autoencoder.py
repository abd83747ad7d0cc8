"""An autoencoder of small images; the encoder is used alone afterwards, out of a checkpoint."""

import json
import os
import tempfile

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Images of 8 x 8 with one bright row or column, and noise of each sample's own."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        image = 0.1 * torch.rand(8, 8, generator=own)
        if index % 2:
            image[index % 8] += 1
        else:
            image[:, index % 8] += 1
        return image


class AutoEncoder(pl.LightningModule):
    def __init__(self, hidden: int = 12, code: int = 3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, 64))
        self.losses = []

    def forward(self, x):
        return self.encoder(x.flatten(1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.decoder(self(batch)), batch.flatten(1))
        self.log("train/mse", loss)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    pl.seed_everything(1234)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoEncoder()
        trainer = pl.Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model=model, train_dataloaders=DataLoader(Stripes(), batch_size=8))
        path = os.path.join(folder, "autoencoder.ckpt")
        trainer.save_checkpoint(path)
        again = AutoEncoder.load_from_checkpoint(path)
    again.freeze()
    codes = again(torch.stack([Stripes()[index] for index in range(4)]))
    return {
        "losses": model.losses,
        "codes": codes.tolist(),
        "hparams": dict(again.hparams),
        "updates": trainer.global_step,
        "training": again.training,
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()))
