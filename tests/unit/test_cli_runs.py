"""Commands that really run, in this process: what they leave behind, and what they print."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trivet.callbacks.prediction_writer import PredictionWriter
from trivet.commands import entry


class Net(trivet.Module):
    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.frozen = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.layer(batch)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self(batch).square().mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/mean", batch.mean())


class Own(Net):
    """The same with an optimizer of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Data(trivet.DataModule):
    def loader(self) -> Any:
        return DataLoader([torch.tensor([float(i)]) for i in range(5)], 2)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


FLAGS = ["--accelerator", "cpu", "--devices", "1", "--enable_progress_bar", "false", "--data", f"{__name__}.Data"]


def run(command: str, *argv: str, model: str = "Own") -> trivet.Trainer:
    limit = ["--max_epochs", "2"] if command == "fit" else []
    args = [command, *FLAGS, *limit, "--model", f"{__name__}.{model}", *argv]
    code, trainer = entry.run(args, prog="trivet")
    assert code == 0
    assert trainer is not None
    return trainer


# ----------------------------------------------------------------------------------------------------------- optimizers


def test_an_optimizer_for_a_module_without_one() -> None:
    trainer = run("fit", "--optimizer", "AdamW", "--optimizer.lr", "0.25", model="Net")
    run_ = trainer._ended
    assert run_ is not None
    (optimizer,) = run_.engine.optimizers
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]  # what can be trained


def test_an_optimizer_and_a_schedule_replace_the_modules_own() -> None:
    flags = ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1", "--lr_scheduler.gamma", "0.5"]
    for optimizer in ([], ["--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.5"]):
        trainer = run("fit", *flags, *optimizer)
        assert trainer._ended is not None
        assert trainer._ended.engine.optimizers[0].param_groups[0]["lr"] == 0.125
    trainer = run("fit", *flags, "--lr_scheduler.interval", "update")  # three updates in each of two epochs
    assert trainer._ended is not None
    assert trainer._ended.engine.optimizers[0].param_groups[0]["lr"] == 0.5 * 0.5**6


def test_a_schedule_that_watches_a_metric(folder: Path) -> None:
    (folder / "a.yaml").write_text(
        "lr_scheduler: {class_path: lightning.pytorch.cli.ReduceLROnPlateau, init_args: {monitor: val/loss}}"
    )
    importlib.import_module("trivet.compat.lightning.cli")  # whose class of that name is not the one that is meant
    trainer = run("fit", "--config", "a.yaml", "--lr_scheduler.patience", "0")
    assert trainer._ended is not None
    assert trainer._ended.engine.schedules[0].monitor == "val/loss"


def test_a_schedule_needs_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["fit", *FLAGS, "--max_epochs", "1", "--model", f"{__name__}.Net", "--lr_scheduler", "ConstantLR"]
    assert entry.run(args, prog="trivet")[0] == 2
    assert "Net has no configure_optimizers(). Add --optimizer NAME, too." in capsys.readouterr().err
    assert entry.run([*args[:-1], "Constant"], prog="trivet")[0] == 2
    assert "--lr_scheduler 'Constant' is not known. Did you mean 'ConstantLR'?" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- stages


def test_the_configuration_lies_beside_each_run() -> None:
    first, second = run("fit", "--model.lr", "0.25"), run("fit", "--model.lr", "0.25")
    assert first.log_dir != second.log_dir
    stored = [Path(trainer.log_dir, "config.yaml").read_text() for trainer in (first, second)]
    assert stored[0] == stored[1]
    assert yaml.safe_load(stored[0])["model"] == {"class_path": f"{__name__}.Own", "lr": 0.25}
    again = run("fit", "--config", str(Path(first.log_dir, "config.yaml")))
    assert again.config == first.config
    for _ in range(2):  # all in one directory
        trainer = run("fit", "--logger", "csv", "--logger.version", "7", "--ckpt_path", last_of(first))
    assert sorted(path.name for path in Path(trainer.log_dir).glob("config*")) == ["config-2.yaml", "config.yaml"]


def last_of(trainer: trivet.Trainer) -> str:
    callback = trainer.checkpoint_callback
    assert callback is not None
    return callback.last_model_path or callback.best_model_path


def test_a_run_that_leaves_nothing_leaves_no_configuration(folder: Path) -> None:
    run("fit", "--logger", "false", "--enable_checkpointing", "false")
    run("fit", "--fast_dev_run", "true")
    assert list(folder.rglob("config*")) == []


def test_validate_and_test_print_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    path = last_of(run("fit"))
    capsys.readouterr()
    run("validate", "--ckpt_path", path)
    assert capsys.readouterr().out.startswith("validate: val/loss ")
    run("test", "--ckpt_path", path)
    assert capsys.readouterr().out == "test: test/mean 2\n"


def test_predict_writes_where_it_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run("predict")
    out = capsys.readouterr().out
    assert out.startswith("predict: 3 batches: 2 of Tensor (2, 1) float32, 1 of Tensor (1, 1) float32; written to ")
    path = Path(trainer.log_dir, "predictions.pt")
    assert out.rstrip().endswith(str(path))
    kept = torch.load(path)
    assert torch.cat(kept).shape == (5, 1)
    for _ in range(2):  # a file that the user names is replaced
        run("predict", "--output", "mine.pt")
        assert all(torch.equal(*pair) for pair in zip(torch.load("mine.pt"), kept, strict=True))


def test_predict_streams_into_a_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "many").mkdir()
    (folder / "many" / "000-000000099.pt").write_bytes(b"of an earlier command")
    (folder / "many" / "notes.pt").write_bytes(b"not ours")
    run("predict", "--output", "many")
    assert capsys.readouterr().out == "predict: written to many\n"
    (folder / "many" / "notes.pt").unlink()
    found = list(PredictionWriter.read("many"))
    assert [one["indices"] for one in found] == [[0, 1], [2, 3], [4]]
    (folder / "plain").write_text("")
    assert entry.run(["predict", *FLAGS, "--model", f"{__name__}.Net", "--output", "plain"], prog="trivet")[0] == 2
    assert "--output 'plain' is a file." in capsys.readouterr().err
    for path, said in {"a.csv": "'a.csv' ends like a file. Name one", "plain/a.pt": "'plain' is a file, and"}.items():
        assert entry.run(["predict", *FLAGS, "--model", f"{__name__}.Net", "--output", path], prog="trivet")[0] == 2
        assert said in capsys.readouterr().err
    assert entry.run(["fit", *FLAGS, "--model", f"{__name__}.Net", "--output", "x"], prog="trivet")[0] == 2
    assert "--output belongs to `trivet predict`" in capsys.readouterr().err
