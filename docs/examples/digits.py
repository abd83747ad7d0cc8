"""Handwritten digits: a small convolutional network on scikit-learn's 1797 images of 8 x 8 pixels.

python digits.py fit --strategy ddp --devices 2 --precision bf16
trivet fit --model digits.Digits --data digits.DigitsData --max_epochs 8 --strategy ddp --devices 2 --precision bf16
"""

from typing import Any

import torch
import trivet
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(trivet.Module):
    """A small convolutional network.

    Args:
        width: Channels of the first convolution.
        lr: The learning rate of AdamW.
    """

    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("val/loss", cross_entropy(logits, labels), prog_bar=True)
        self.log("val/acc", (logits.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class DigitsData(trivet.DataModule):
    """The digits, split into 1437 for training and 360 for validation, always in the same way."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        split = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(TensorDataset(inputs, torch.tensor(labels)), [0.8, 0.2], generator=split)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 128)


if __name__ == "__main__":
    trivet.cli(Digits, DigitsData, trainer_defaults={"max_epochs": 8})
