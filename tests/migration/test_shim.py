"""Lightning's names under `trivet.compat.lightning`, and what is said of those that are not there."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trivet import registry
from trivet.compat import lightning as L
from trivet.compat.lightning import facade, names, spelling
from trivet.errors import ConfigurationError, PluginBroken

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "max_epochs": 1,
}  # fmt: skip


class Net(L.LightningModule):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)
        self.example_input_array = torch.zeros(1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    validation_step = test_step = training_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(self.hparams.size, 2)), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("path", sorted({*names.TARGETS, *names.SOURCES}))
def test_every_name_leads_somewhere(path: str) -> None:
    module = importlib.import_module(f"trivet.compat.lightning.{path}" if path else "trivet.compat.lightning")
    for name in facade.known(path):
        assert getattr(module, name) is not None, name


def test_modules_below_a_known_one_have_its_names() -> None:
    from trivet.compat.lightning.pytorch.callbacks.early_stopping import EarlyStopping
    from trivet.compat.lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

    assert EarlyStopping is L.pytorch.callbacks.EarlyStopping
    assert issubclass(EarlyStopping, trivet.callbacks.EarlyStopping)
    assert rank_zero_only(lambda: 3)() == 3
    rank_zero_info("said on rank 0")
    assert issubclass(L.pytorch.callbacks.ModelCheckpoint, trivet.Checkpoint)
    assert L.pytorch.loggers.CSVLogger("logs").root_dir == "logs/lightning_logs"
    assert L.Callback is trivet.Callback
    assert issubclass(L.LightningModule, trivet.Module)


@pytest.mark.parametrize("name", sorted(names.INSTEAD))
def test_what_is_not_there_says_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"Trivet has no {name}. "):
        exec(f"from trivet.compat.lightning.pytorch.callbacks import {name}")
    with pytest.raises(ImportError, match=f"Trivet has no {name}. "):
        getattr(L, name)


def test_a_misspelt_name() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'EarlyStopping'"):
        _ = L.pytorch.callbacks.EarlyStoping
    assert not hasattr(L, "NoSuchThing")


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("ddp_find_unused_parameters_true", {"name": "ddp", "find_unused_parameters": True}),
        ("ddp_spawn", "ddp"),
        ("fsdp_cpu_offload", {"name": "fsdp", "cpu_offload": True}),
        ("deepspeed_stage_2_offload", {"name": "deepspeed", "stage": 2, "offload_optimizer": True}),
        ("single_device", "single"),
        ("zero2", "zero2"),
        ({"class_path": "lightning.pytorch.strategies.DDPStrategy"}, {"class_path": "ddp"}),
    ],
)
def test_names_of_strategies(theirs: Any, ours: Any) -> None:
    assert spelling.strategy(theirs) == ours


def test_strategies_as_objects() -> None:
    strategies = L.pytorch.strategies
    made = strategies.DDPStrategy(find_unused_parameters=True, bucket_cap_mb=10)
    assert (type(made).__name__, made.find_unused_parameters, made.bucket_size_mb) == ("DDP", True, 10)
    assert type(strategies.SingleDeviceStrategy()).__name__ == "Single"
    made = strategies.FSDPStrategy(auto_wrap_policy={nn.Linear}, sharding_strategy="SHARD_GRAD_OP", cpu_offload=False)
    assert (made.unit_classes, made.reshard_after_forward) == (["Linear"], False)
    with pytest.raises(ConfigurationError, match=r"NO_SHARD.*strategy='ddp'"):
        strategies.FSDPStrategy(sharding_strategy="NO_SHARD")
    with pytest.raises(ConfigurationError, match=r"model_averaging_period.*leave it out"):
        strategies.DDPStrategy(model_averaging_period=3)
    assert isinstance(L.Trainer(strategy=strategies.DDPStrategy(), **QUIET), trivet.Trainer)


def test_deepspeed_as_an_object() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        with pytest.raises(PluginBroken, match="pip install"):
            L.pytorch.strategies.DeepSpeedStrategy(stage=3)
    else:
        assert L.pytorch.strategies.DeepSpeedStrategy(stage=3).stage == 3
    with pytest.raises(ConfigurationError, match="DeepSpeed file"):
        L.pytorch.strategies.DeepSpeedStrategy(offload_parameters=True)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"gpus": 1}, "gpus=1.*accelerator='gpu'"),
        ({"use_distributed_sampler": False}, "already_sharded"),
        ({"resume_from_checkpoint": "x"}, "ckpt_path"),
        ({"strategy": "dp"}, "Use 'ddp'"),
        ({"precision": "transformer-engine"}, "bf16-mixed"),
        ({"plugins": [object()]}, "Only a precision"),
        ({"model_registry": "a"}, "give ckpt_path a path"),
    ],
)
def test_arguments_that_are_not_there(argument: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        L.Trainer(**{**QUIET, **argument})


def test_arguments_are_spelt_in_our_words() -> None:
    plugins = [L.pytorch.plugins.MixedPrecision("bf16-mixed", "cpu")]
    trainer = L.Trainer(
        **QUIET, plugins=plugins, max_time={"minutes": 2}, limit_val_batches=None, num_sanity_val_steps=0,
        min_steps=2, gradient_clip_val=0.5,
    )  # fmt: skip
    assert (trainer.min_epochs, trainer.min_steps) == (None, 2)
    assert (trainer.gradient_clip_val, trainer.gradient_clip_algorithm) == (0.5, "norm")
    assert trainer.limits.max_seconds == timedelta(minutes=2).total_seconds()
    assert trainer.resolve(None, None).plan.precision.startswith("bf16-mixed")
    with pytest.raises(AttributeError, match=r"trainer\.progress counts"):
        _ = trainer.fit_loop
    with pytest.raises(AttributeError, match=r"Use trainer\.engine\.precision"):
        _ = trainer.precision
    assert not hasattr(trainer, "no_such_thing")


# ----------------------------------------------------------------------------------------------------------------- runs


def test_the_order_of_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = Net(), Data()
    trainer = L.Trainer(**QUIET)
    trainer.fit(model=model, train_dataloaders=data)
    trainer.save_checkpoint(filepath=tmp_path / "saved.ckpt")
    assert (trainer.lightning_module, trainer.model) == (model, model)
    assert trainer.callback_metrics["loss"].item() == float(trainer.callback_metrics["loss"].detach().cpu().numpy())
    capsys.readouterr()
    assert trainer.validate(model, data.val_dataloader(), str(tmp_path / "saved.ckpt"), True)[0].keys() == {"loss"}
    assert "Validate metric" in capsys.readouterr().out
    assert trainer.test(model, data, None, False)[0].keys() == {"loss"}
    assert not capsys.readouterr().out
    predictions = trainer.predict(model, datamodule=data, weights_only=True)
    assert predictions is not None
    assert len(predictions) == 2


def test_a_data_module_of_data_sets() -> None:
    data = L.LightningDataModule.from_datasets(TensorDataset(torch.ones(6, 2)), batch_size=3)
    trainer = L.Trainer(**QUIET)
    trainer.fit(Net(), data)
    assert trainer.global_step == 2
    assert dict(Data(size=5).hparams) == {"size": 5}


def test_weights_of_a_lightning_checkpoint(tmp_path: Path) -> None:
    path, model = tmp_path / "old.ckpt", Net(width=3)
    torch.save({"state_dict": model.state_dict(), "hyper_parameters": {"width": 3}, "epoch": 1}, path)
    loaded = Net.load_from_checkpoint(path)
    assert torch.equal(loaded.layer.weight, model.layer.weight)
    with pytest.raises(ConfigurationError, match=r"Net\.load_from_checkpoint\(path\)"):
        L.Trainer(**QUIET).fit(Net(), Data(), ckpt_path=path)


def test_export(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        for method in ("script", "trace"):
            Net().to_torchscript(tmp_path / "net.pt", method=method)
            assert torch.jit.load(str(tmp_path / "net.pt"))(torch.zeros(1, 2)).shape == (1, 1)  # type: ignore[no-untyped-call]
    with pytest.raises(AttributeError, match=r"to_tensorrt.*Export with to_onnx"):
        Net().to_tensorrt()


def test_an_installed_callback_is_not_attached_by_itself() -> None:
    assert any(entry.name == "early_stopping" for entry in registry.entries("callback"))
    assert not any(isinstance(one, trivet.callbacks.EarlyStopping) for one in L.Trainer(**QUIET).callbacks)


def test_a_step_that_wants_an_iterator() -> None:
    with pytest.raises(ConfigurationError, match="A step gets one batch"):

        class Iterates(L.LightningModule):
            def training_step(self, dataloader_iter: Any) -> None: ...


SCRIPT = """
import lightning as L, pytorch_lightning as pl, torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
import lightning.pytorch as also
assert L.pytorch is also and pl.Trainer is L.Trainer
from torch.utils.data import DataLoader, TensorDataset
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        import lightning.pytorch.utilities  # in a worker process, too
        self.log("rank", float(self.global_rank), on_epoch=True)
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_false", max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2))
print("steps", trainer.global_step, trainer.callback_metrics["rank_epoch"].item())
"""


@pytest.mark.slow
def test_a_script_that_imports_lightning_runs_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trivet.compat.lightning", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "steps 1 0.5" in done.stdout, done.stderr
