"""A generator and a discriminator of points on a line, trained in turns by manual optimization."""

import json

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class GAN(pl.LightningModule):
    def __init__(self, latent_dim: int = 4, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent_dim, 16), nn.ReLU(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.noise = torch.Generator().manual_seed(11)  # not the global one
        self.losses = []

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, logits, real):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch):
        (points,) = batch
        g_opt, d_opt = self.optimizers()
        z = torch.randn(len(points), self.hparams.latent_dim, generator=self.noise)

        self.toggle_optimizer(g_opt)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), real=True)
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(g_opt, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        g_opt.step()
        self.untoggle_optimizer(g_opt)

        self.toggle_optimizer(d_opt)
        real = self.adversarial_loss(self.discriminator(points), real=True)
        fake = self.adversarial_loss(self.discriminator(self(z).detach()), real=False)
        d_loss = (real + fake) / 2
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        d_opt.step()
        self.untoggle_optimizer(d_opt)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)
        self.losses.append([g_loss.item(), d_loss.item()])

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        return [g_opt, d_opt], [torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.9) for opt in (g_opt, d_opt)]


def main():
    pl.seed_everything(3)
    along = torch.linspace(-1, 1, 60)
    points = TensorDataset(torch.stack([along, 2 * along + 0.5], dim=1))
    model = GAN()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(points, batch_size=12))
    made = model(torch.ones(3, 4)).tolist()
    return {"losses": model.losses, "made": made, "epoch": trainer.current_epoch}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()))
