"""A generative adversarial network: two optimizers, stepped by hand, at different rates.

    python docs/examples/gan.py                      # ten seconds on one core
    python docs/examples/gan.py --devices 2          # the same with two processes

The generator learns to draw points on a circle. `automatic_optimization = False` hands the update to `training_step`:
the optimizers of `self.optimizers()` average gradients over the processes, clip and count, whatever the strategy. The
discriminator steps in each batch, the generator in every second one. Each has a schedule of its own, moved by hand.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset


def circle(points: int) -> TensorDataset:
    """Points at distance 1 from the origin, give or take a little."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(points, generator=generator) * 2 * math.pi
    noise = torch.randn(points, 2, generator=generator) * 0.02
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) + noise)


def net(inputs: int, outputs: int, width: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class GAN(trivet.Module):
    def __init__(self, latent: int = 4, width: int = 64, lr: float = 1e-3, generator_every: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = net(latent, 2, width), net(2, 1, width)
        self.example_input_array = torch.zeros(1, latent)

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def noise(self, like: Tensor) -> Tensor:
        return torch.randn(len(like), self.hparams.latent, device=like.device)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        generator, discriminator = self.optimizers()
        ones, zeros = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)

        with self.toggled_optimizer(discriminator):
            fake = self(self.noise(real)).detach()
            loss = (bce(self.discriminator(real), 0.9 * ones) + bce(self.discriminator(fake), zeros)) / 2
            discriminator.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(discriminator, gradient_clip_val=1.0)
            discriminator.step()
            self.log("d_loss", loss, prog_bar=True)

        if batch_idx % self.hparams.generator_every == 0:
            with self.toggled_optimizer(generator):
                loss = bce(self.discriminator(self(self.noise(real))), ones)
                generator.zero_grad()
                self.manual_backward(loss)
                generator.step()
                self.log("g_loss", loss, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():
            schedule.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """How far the points that are drawn lie from the circle."""
        (real,) = batch
        radius = self(self.noise(real)).norm(dim=1)
        self.log("distance", (radius - 1).abs().mean(), prog_bar=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        (real,) = batch
        return self(self.noise(real))

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.discriminator
        optimizers = [torch.optim.Adam(part.parameters(), self.hparams.lr, betas=(0.5, 0.999)) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def main(arguments: list[str] | None = None) -> tuple[GAN, trivet.Trainer]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--points", type=int, default=8192)
    options = parser.parse_args(arguments)
    trivet.seed_everything(1)
    module = GAN()
    trainer = trivet.Trainer(
        accelerator="cpu", devices=options.devices, max_epochs=options.epochs, logger=False, enable_checkpointing=False
    )
    data = circle(options.points)
    trainer.fit(module, DataLoader(data, 64, shuffle=True), DataLoader(TensorDataset(*data[:1024]), 256))
    drawn = trainer.predict(module, DataLoader(TensorDataset(*data[:8]), 4))
    print(f"distance from the circle {trainer.validate(module, DataLoader(data, 1024))[0]['distance']:.3f}")
    print("a few points:", ", ".join(f"({x:.2f}, {y:.2f})" for x, y in torch.cat(drawn or []).tolist()))
    return module, trainer


if __name__ == "__main__":
    main()
