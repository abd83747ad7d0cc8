"""Commands that go on from a checkpoint: with other optimizers, from the last or best one, from one that is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trivet.commands import entry


class Net(trivet.Module):
    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        return DataLoader([torch.tensor([1.0]), torch.tensor([2.0])])  # type: ignore[arg-type]


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


STEP = ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1"]
FLAGS = ["--accelerator", "cpu", "--devices", "1", "--enable_progress_bar", "false", "--model", f"{__name__}.Net"]


def fit(*argv: str, epochs: int = 1) -> tuple[int, Any]:
    return entry.run(["fit", *FLAGS, "--max_epochs", str(epochs), *argv], prog="trivet")


def saved(*argv: str) -> str:
    code, trainer = fit(*argv)
    assert code == 0
    return str(trainer.checkpoint_callback.last_model_path or trainer.checkpoint_callback.best_model_path)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, _ = fit(*argv, epochs=2)
    assert code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return " ".join(said.split())


MODEL = ["--model", f"{__name__}.Scheduled"]
ADAM = ["--optimizer", "Adam"]


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            STEP,
            [],
            r"written with torch\S+StepLR, and here there is no scheduler. Give --lr_scheduler torch\S+StepLR as",
        ),
        (
            [],
            STEP,
            r"written with no scheduler, and here .* torch\S+StepLR. .* the model's own: leave out --lr_scheduler",
        ),
        (
            ADAM,
            [],
            r"written with torch.optim.Adam, and here there is torch.optim.SGD. Give --optimizer torch.optim.Adam",
        ),
        (
            [],
            ADAM,
            r"with torch.optim.SGD, and here there is torch.optim.Adam. It was the model's own: leave out --optim",
        ),
        (ADAM, ["--optimizer", "AdamW"], r"and here there is torch.optim.AdamW. Give --optimizer torch.optim.Adam as"),
        (MODEL, [], r"with torch\S+ConstantLR, and here there is no scheduler. The model's configure_optimizers\(\)"),
    ],
    ids=["lost scheduler", "new scheduler", "lost optimizer", "new optimizer", "other optimizer", "other model"],
)
def test_other_optimizers_than_the_checkpoints_are_refused_with_the_flag(
    capsys: pytest.CaptureFixture[str], then: list[str], now: list[str], message: str
) -> None:
    assert re.search(message, refused(capsys, "--ckpt_path", saved(*then), *now))


def test_the_same_class_however_it_is_named_goes_on() -> None:
    code, trainer = fit("--ckpt_path", saved(), "--optimizer", "SGD", "--optimizer.lr", "0.5", epochs=2)
    assert (code, trainer.global_step) == (0, 4)


def test_in_python_the_checkpoints_optimizer_state_rules() -> None:
    path = saved()
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    trainer = trivet.Trainer(max_epochs=2, **options)  # type: ignore[arg-type]
    trainer.fit(Net(lr=0.125), ckpt_path=path)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    code, trainer = fit("--ckpt_path", path, "--model.lr", "0.125", epochs=2)
    assert (code, trainer.optimizers[0].param_groups[0]["lr"]) == (0, 0.125)


@pytest.mark.parametrize("which", ["last", "best"])
def test_last_and_best_of_an_earlier_process(capsys: pytest.CaptureFixture[str], which: str) -> None:
    said = refused(capsys, "--ckpt_path", which)
    assert f"ckpt_path='{which}'" in said
    assert "trivet_runs" in said  # where it looked
    saved("--model.lr", "0.25")
    code, trainer = fit("--ckpt_path", which, epochs=2)
    assert (code, trainer.global_step) == (0, 4)
    assert refused(capsys, "--ckpt_path", which, "--default_root_dir", "elsewhere").count("elsewhere")


def test_a_checkpoint_that_is_missing_is_found_before_processes_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from trivet.launch.local import Local

    monkeypatch.setattr(Local, "launch", lambda *args, **rest: pytest.fail("launched"))
    two = ["--devices", "2", "--strategy", "ddp"]
    said = refused(capsys, *two, "--ckpt_path", "nowhere")
    assert said.endswith(f"trivet fit: cannot read checkpoint {str(folder / 'nowhere')!r}: it does not exist")
    for command in ("validate", "predict"):
        assert entry.run([command, *FLAGS, *two, "--ckpt_path", "nowhere"], prog="trivet")[0] == 2
        assert "it does not exist" in capsys.readouterr().err
