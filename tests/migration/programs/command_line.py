"""A LightningCLI script, run with `fit --config command_line.yaml` and more flags."""

import json
import sys

import torch
from pytorch_lightning import Callback, LightningDataModule, LightningModule
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lines(LightningDataModule):
    def __init__(self, count: int = 40, features: int = 3, batch_size: int = 4):
        super().__init__()
        self.count, self.features, self.batch_size = count, features, batch_size

    def setup(self, stage):
        own = torch.Generator().manual_seed(0)
        x = torch.randn(self.count, self.features, generator=own)
        self.data = TensorDataset(x, x.sum(dim=1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)


class Linear(LightningModule):
    def __init__(self, features: int = 1, bias: bool = True, scale: float = 1.0):
        super().__init__()
        self.layer, self.scale = nn.Linear(features, 1, bias=bias), scale

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.scale * nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layer(x), y))


class Losses(Callback):
    def __init__(self, digits: int = 3):
        self.digits, self.values = digits, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


class CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser):
        parser.link_arguments("data.features", "model.features")
        parser.add_lightning_class_args(Losses, "losses")
        parser.set_defaults({"losses.digits": 5, "trainer.max_epochs": 9})
        parser.add_argument("--note", default="none")

    def before_fit(self):
        self.order = [f"before fit {self.config['fit']['note']}"]

    def after_fit(self):
        self.order.append("after fit")


def main():
    cli = CLI(
        Linear,
        Lines,
        seed_everything_default=1,
        save_config_callback=None,
        trainer_defaults={"accelerator": "cpu", "devices": 1, "logger": False, "enable_model_summary": False},
    )
    losses = next(callback for callback in cli.trainer.callbacks if isinstance(callback, Losses))
    return {
        "losses": losses.values,
        "digits": losses.digits,
        "metrics": {name: value.item() for name, value in cli.trainer.callback_metrics.items()},
        "weight": cli.model.layer.weight.tolist(),
        "bias": cli.model.layer.bias is not None,
        "max_epochs": cli.trainer.max_epochs,
        "batch_size": cli.datamodule.batch_size,
        "order": cli.order,
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()), file=sys.stdout)
