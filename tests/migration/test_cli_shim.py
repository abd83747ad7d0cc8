"""LightningCLI over Trivet's own commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.compat import lightning as L
from trivet.compat.lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from trivet.errors import ConfigurationError

FAST: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False,
}  # fmt: skip


class Net(L.LightningModule):
    def __init__(self, features: int = 2, lr: float = 0.1) -> None:
        super().__init__()
        self.lr, self.layer = lr, nn.Linear(features, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(L.LightningDataModule):
    def __init__(self, size: int = 4, features: int = 2) -> None:
        super().__init__()
        self.size, self.features, self.width = size, features, None

    def setup(self, stage: str) -> None:
        self.width = self.features + 1

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(self.size, self.width)), batch_size=2)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)


def cli(*args: Any, cls: type[Any] = LightningCLI, **options: Any) -> Any:
    words = list(args) if not (args and isinstance(args[0], dict)) else args[0]
    return cls(Net, Data, args=words, trainer_defaults=FAST, save_config_callback=None, **options)


class Linked(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.width", "model.features", apply_on="instantiate")
        parser.link_arguments("data.size", "model.lr", compute_fn=lambda size: size / 100)


def test_a_command_with_links() -> None:
    made = cli("fit", "--data.size=6", "--trainer.max_epochs=2", cls=Linked)
    assert (made.subcommand, made.trainer.global_step) == ("fit", 6)
    assert (made.model.layer.in_features, made.model.lr) == (3, 0.06)
    assert made.config["fit"]["data"]["size"] == 6
    assert made.config["fit"]["trainer"]["max_epochs"] == 2


def test_without_running() -> None:
    made = cli("--model.lr", "0.5", run=False)
    assert (made.subcommand, made.model.lr, made.config["model"]["lr"]) == (None, 0.5, 0.5)
    assert made.trainer.global_step == 0
    assert isinstance(made.datamodule, Data)


def test_arguments_as_a_mapping() -> None:
    given = {"fit": {"model": {"lr": 0.25, "features": 3}, "trainer": {"max_epochs": 1}, "seed_everything": 3}}
    made = cli({"subcommand": "fit", **given})
    assert (made.model.lr, made.config["fit"]["seed_everything"]) == (0.25, 3)
    assert cli({"model": {"lr": 0.75}}, run=False).model.lr == 0.75


def test_default_files_of_a_command() -> None:
    Path("defaults.yaml").write_text("model: {lr: 0.125}\ntrainer: {strategy: single_device}\n")
    files = {"default_config_files": ["defaults.yaml", "none.yaml"]}
    assert cli(run=False, parser_kwargs=files).model.lr == 0.125
    assert cli("fit", "--model.features=3", parser_kwargs={"fit": files, "test": {}}).model.lr == 0.125
    with pytest.raises(ConfigurationError, match="TRIVET_FIT__MODEL__LR"):
        cli(run=False, parser_kwargs={"default_env": True})
    with pytest.raises(ConfigurationError, match="Links take the place"):
        cli(run=False, parser_kwargs={"parser_mode": "omegaconf"})


class Optimizer(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR)
        parser.set_defaults({"lr_scheduler.step_size": 3, "model.features": 3})

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        lightning_module.chosen = (optimizer, lr_scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}


def test_an_optimizer_of_the_script() -> None:
    made = cli("fit", "--optimizer.lr=0.5", cls=Optimizer)
    optimizer, scheduler = made.model.chosen
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.param_groups[0]["initial_lr"], scheduler.step_size, scheduler.last_epoch) == (0.5, 3, 2)


class Saves(SaveConfigCallback):
    found: tuple[str, str] = ("", "")

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        Saves.found = (stage, self.parser.dump(self.config))


def test_a_callback_that_saves_the_configuration() -> None:
    LightningCLI(Net, Data, Saves, args=["fit", "--model.features=3", "--model.lr=0.0625"], trainer_defaults=FAST)
    stage, text = Saves.found
    assert stage == "fit"
    assert "lr: 0.0625" in text


def test_classes_on_the_command_line() -> None:
    made = LightningCLI(
        Net, Data, None, subclass_mode_model=True, subclass_mode_data=True, run=False, trainer_defaults=FAST,
        args=["--model", f"{__name__}.Net", "--model.init_args.lr=0.5", "--data", f"{__name__}.Data"],
    )  # fmt: skip
    assert made.model.lr == 0.5
    with pytest.raises(ConfigurationError, match="Set both"):
        LightningCLI(Net, Data, None, subclass_mode_model=True, run=False, args=[])


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("add_optimizer_args", (torch.optim.SGD, "second"), "Let the module take further ones"),
        ("add_lr_scheduler_args", (torch.optim.lr_scheduler.StepLR, "lr_scheduler", "model.x"), "Let the module take"),
        ("add_lightning_class_args", (Net, "net"), "expected a class of callbacks"),
        ("link_arguments", ("a.b", "c.d", None, "sometime"), "'parse' and 'instantiate'"),
    ],
)
def test_what_the_parser_refuses(method: str, arguments: tuple[Any, ...], message: str) -> None:
    class Refused(LightningCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            getattr(parser, method)(*arguments)

    with pytest.raises(ConfigurationError, match=message):
        cli(run=False, cls=Refused)


def test_strategies_in_lightnings_words() -> None:
    made = cli("--trainer.strategy=ddp_find_unused_parameters_true", run=False)
    strategy = made.trainer.resolve(None, None).strategy.plugin
    assert (type(strategy).__name__, strategy.find_unused_parameters) == ("DDP", True)


class Overrides(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_argument("--width", type=int, default=2)
        parser.link_arguments("width", "model.features")

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return super().instantiate_trainer(max_steps=1, **kwargs)

    def fit(self, model: Any, **kwargs: Any) -> None:
        self.given = sorted(kwargs)
        self.trainer.fit(model, **kwargs)
        self.trainer.fit(model, **kwargs)  # as often as it likes


def test_overriding_how_the_trainer_is_made_and_run() -> None:
    made = cli("fit", "--data.size=8", "--width=3", cls=Overrides)
    assert (made.trainer.max_steps, made.trainer.global_step, made.model.layer.in_features) == (1, 1, 3)
    assert made.given == ["ckpt_path", "datamodule"]
    assert made.config.fit.data.size == made.config["fit"]["data"]["size"] == 8


@pytest.mark.parametrize("name", ["instantiate_classes", "parse_arguments", "setup_parser", "_run_subcommand"])
def test_overriding_what_is_not_called_is_refused(name: str) -> None:
    cls = type("Mine", (LightningCLI,), {name: lambda self, *args, **rest: None})
    with pytest.raises(ConfigurationError, match=f"Mine defines {name}, which Trivet's LightningCLI would never call"):
        cli(run=False, cls=cls)


def test_a_trainer_that_is_none() -> None:
    cls = type("Mine", (LightningCLI,), {"instantiate_trainer": lambda self: None})
    with pytest.raises(ConfigurationError, match=r"Mine.instantiate_trainer\(\) returned None, and no Trainer"):
        cli(run=False, cls=cls)
