"""``trivet checkpoint convert``: what comes out of Lightning's files trains on as if nothing had happened."""

from __future__ import annotations

import importlib.util
import pathlib
from pathlib import Path
from typing import Any

import lightning_file
import pytest
import torch
import trivet
from lightning_file import by_hand, epochs, forward, layers, loader, optimizers
from torch import nn
from trivet.checkpoint import directory
from trivet.checkpoint.convert import convert
from trivet.checkpoint.convert_lightning import names_by_shape
from trivet.commands.entry import run
from trivet.errors import CheckpointError, ConfigurationError

MODEL = f"{__name__}.Net"


class Net(trivet.Module):
    def __init__(self, width: int = 7, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = layers(width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return forward(self.net, batch[0])

    def configure_optimizers(self) -> Any:
        return optimizers(self.net, self.hparams.lr)


class Reversed(Net):
    """The parameters in an order that no shape tells."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(list(self.parameters())[::-1], lr=0.1, momentum=0.9)


def trained_on(path: Path) -> Net:
    module = Net.load_from_checkpoint(path)
    trivet.Trainer(
        accelerator="cpu", strategy="single", max_epochs=3, logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    ).fit(module, loader(), ckpt_path=path)  # fmt: skip
    return module


def by_a_plain_loop() -> nn.ModuleDict:
    net = layers(5)
    (optimizer,), (schedule,) = optimizers(net, 0.01)
    epochs(net, optimizer, schedule, 3)
    return net


def assert_same(module: Net, net: nn.ModuleDict) -> None:
    for name, tensor in net.state_dict().items():
        assert torch.equal(module.net.state_dict()[name], tensor), name


# --------------------------------------------------------------------------------------------------------- Lightning


@pytest.mark.parametrize("model", [None, MODEL])
@pytest.mark.parametrize("late", [True, False])
def test_a_file_of_lightning_trains_on_bit_for_bit(model: str | None, late: bool, tmp_path: Path) -> None:
    """``late``: saved after the schedule's step of the epoch, else before it, which the module's class makes up for."""
    by_hand(tmp_path / "a.ckpt", late=late)
    report = convert(tmp_path / "a.ckpt", tmp_path / "new", model=model)
    state = directory.read(tmp_path / "new")
    assert (state.progress["epoch"], state.progress["update"]) == (1, 4)
    assert (state.hparams, state.user) == ({"width": 5, "lr": 0.01}, {"mine": {"a": [1, 2]}})
    assert any("EarlyStopping" in line for line in report.left)
    behind = any("the last epoch's step of scheduler 0" in line for line in report.left)
    assert behind == (not late and model is None)
    if not behind:
        assert_same(trained_on(tmp_path / "new"), by_a_plain_loop())


def test_the_command_prints_what_it_took_and_what_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand(tmp_path / "a.ckpt", odd=None, bad=torch.device("cpu"))
    args = ["checkpoint", "convert", str(tmp_path / "a.ckpt"), "-o", str(tmp_path / "new")]
    assert run(args, prog="trivet")[0] == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Lightning 2.6.6 taken over: - 9 weights and buffers - epochs completed: 1; updates: 4",
        "the state of optimizer 0, its 6 parameters named by order and shapes",
        "not taken over: - the state of the callback EarlyStopping",
        "the order of the samples: the file holds no seed",
    ):
        assert part in text, text
    assert run(args, prog="trivet")[0] == 2
    assert "exists; choose another name" in capsys.readouterr().err


def test_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    loops = {
        "epoch_progress": lightning_file.progress(2, 1, 1),
        "epoch_loop.batch_progress": {**lightning_file.progress(2, 2, 1), "is_last_batch": False},
    }
    by_hand(tmp_path / "a.ckpt", loops={"fit_loop": loops}, epoch=1, global_step=6)
    report = convert(tmp_path / "a.ckpt", tmp_path / "new")
    assert directory.manifest(tmp_path / "new")["progress"]["epoch"] == 1
    assert "the 2 batches of epoch 1 that had been trained on: it begins anew" in report.left


def test_parameters_whose_order_cannot_be_told_need_the_class(tmp_path: Path) -> None:
    module = Reversed(5)
    optimizer = module.configure_optimizers()
    forward(module.net, torch.randn(4, 3)).backward()
    optimizer.step()
    weights = module.state_dict()
    assert names_by_shape(optimizer.state_dict(), weights) is None
    more = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()], "lr_schedulers": []}
    by_hand(tmp_path / "a.ckpt", **more)
    report = convert(tmp_path / "a.ckpt", tmp_path / "one")
    assert any("Give --model package.module.Class" in line for line in report.left)
    assert directory.read(tmp_path / "one").optimizers == []
    convert(tmp_path / "a.ckpt", tmp_path / "two", model=f"{__name__}.Reversed")
    (found,) = directory.read(tmp_path / "two").optimizers
    for name, param in module.named_parameters():
        assert torch.equal(found["state"][name]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])


def test_tied_and_frozen_weights_have_one_number(tmp_path: Path) -> None:
    tied = nn.Linear(2, 2)
    net = nn.ModuleDict({"a": tied, "b": tied})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert names_by_shape(optimizer.state_dict(), net.state_dict()) == ["a.weight", "a.bias"]


def test_what_would_have_to_be_unpickled_is_refused(tmp_path: Path) -> None:
    by_hand(tmp_path / "a.ckpt", hyper_parameters={"where": pathlib.PurePosixPath("a")})
    with pytest.raises(CheckpointError, match=r"make objects of pathlib.PurePosixPath.*--allow pathlib.PurePosixPath"):
        convert(tmp_path / "a.ckpt", tmp_path / "new")
    report = convert(tmp_path / "a.ckpt", tmp_path / "new", allow=["pathlib.PurePosixPath"])
    assert any("where is a pathlib.PurePosixPath" in line for line in report.left)
    assert directory.read(tmp_path / "new").hparams == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"text", "no file that torch.save has written"),
        ({"weights": 1}, "it has no 'state_dict' of tensors"),
        ({"state_dict": {"a": 1}}, "it has no 'state_dict' of tensors"),
    ],
)
def test_what_is_no_file_of_lightning(content: Any, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=reason):
        convert(file, tmp_path / "new")


def test_another_class_and_another_format(tmp_path: Path) -> None:
    by_hand(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="has other weights than the file"):
        convert(tmp_path / "a.ckpt", tmp_path / "new", model="torch.nn.Identity")
    with pytest.raises(ConfigurationError, match=r"'nowhere\.Net' cannot be imported"):
        convert(tmp_path / "a.ckpt", tmp_path / "new", model="nowhere.Net")
    (tmp_path / "sharded.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="consolidate_checkpoint"):
        convert(tmp_path / "sharded.ckpt", tmp_path / "new")
    convert(tmp_path / "a.ckpt", tmp_path / "new")
    with pytest.raises(CheckpointError, match="there is nothing to convert"):
        convert(tmp_path / "new", tmp_path / "newer")


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
@pytest.mark.filterwarnings("ignore")
def test_lightnings_own_file_is_the_same(tmp_path: Path) -> None:
    lightning_file.with_lightning(tmp_path / "theirs.ckpt")
    by_hand(tmp_path / "ours.ckpt")
    theirs, ours = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    convert(tmp_path / "theirs.ckpt", tmp_path / "new")
    assert_same(trained_on(tmp_path / "new"), by_a_plain_loop())
