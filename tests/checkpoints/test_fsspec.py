"""Checkpoints on a file system of fsspec's: here ``memory://``, which nothing else shares with this process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import trivet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory, files, places
from trivet.checkpoint.manifest import MARKER
from trivet.commands.entry import run
from trivet.errors import CheckpointError, ConfigurationError
from trivet.state import TrainState


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty file system in memory; whatever is written here by mistake is seen in the current directory."""
    monkeypatch.chdir(tmp_path)
    found = fsspec.filesystem("memory")
    yield found
    for path in found.ls("/", detail=False):
        found.rm(path, recursive=True)


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 12).view(4, 3)), 2)


def make_trainer(**options: Any) -> trivet.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "strategy": "single"}
    return trivet.Trainer(**{**quiet, "max_epochs": 4, **options})


def names(memory: Any, url: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in memory.ls(url, detail=False))


def weights() -> dict[str, Any]:
    module = Net()
    make_trainer(enable_checkpointing=False).fit(module, loader())
    return module.state_dict()


@pytest.mark.parametrize("save_async", [False, True])
def test_a_run_saves_there_and_goes_on_from_there(save_async: bool, memory: Any) -> None:
    save = Checkpoint(
        "memory://runs/a", filename="{epoch}", monitor="loss", save_top_k=2, save_last=True, save_async=save_async
    )
    make_trainer(max_epochs=2, callbacks=[save]).fit(Net(), loader(), loader())
    assert names(memory, "/runs/a") == ["1", "2", "last.json"]
    assert save.last_model_path == "memory://runs/a/2"
    assert json.loads(memory.cat_file("/runs/a/last.json")) == {"path": "2"}
    assert not memory.exists(f"/runs/a/2/{MARKER}")
    module = Net()
    make_trainer(callbacks=[save]).fit(module, loader(), loader(), ckpt_path="last")
    assert names(memory, "/runs/a") == ["2", "3", "4", "last.json"]  # the one that it began from stays
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in weights().items())
    assert make_trainer().validate(Net(), loader(), ckpt_path="memory://runs/a/4", verbose=False)[0]["loss"] > 0
    again = Net.load_from_checkpoint("memory://runs/a/4")
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_default_root_dir(memory: Any, tmp_path: Path) -> None:
    trainer = make_trainer(default_root_dir="memory://runs", max_epochs=1)
    trainer.fit(Net(), loader())
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.best_model_path.startswith("memory://runs/checkpoints/")
    trainer = make_trainer(default_root_dir="memory://runs", max_epochs=1, logger=True)
    trainer.fit(Net(), loader())
    assert trainer.checkpoint_callback is not None
    where = Path(trainer.log_dir)
    assert where.is_relative_to("trivet_runs")
    below = where.relative_to("trivet_runs").as_posix()
    assert trainer.checkpoint_callback.best_model_path.startswith(f"memory://runs/{below}/checkpoints/")
    assert not list(tmp_path.glob("memory*"))
    assert not list(tmp_path.rglob("*.distcp"))


def test_save_checkpoint_and_the_tools(memory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(enable_checkpointing=False, max_epochs=1)
    trainer.fit(Net(), loader())
    trainer.save_checkpoint("memory://x/one")
    with pytest.raises(CheckpointError, match=r"memory://x/one.*nothing can be replaced in one step"):
        trainer.save_checkpoint("memory://x/one")
    trainer.save_checkpoint(tmp_path / "two")
    for args, code, text in (
        (["list", "memory://x"], 0, "one  epoch 1  update 2"),
        (["inspect", "memory://x/one"], 0, "layer.weight  float32  2x3"),
        (["verify", "memory://x/one"], 0, "ok   memory://x/one"),
        (["verify", "memory://x"], 2, "see `trivet checkpoint list memory://x`"),
        (["diff", "memory://x/one", str(tmp_path / "two")], 0, ""),
        (["consolidate", "memory://x/one", "-o", str(tmp_path / "w.safetensors")], 0, "2 tensors"),
        (["convert", "memory://x/one", "-o", str(tmp_path / "c")], 2, "copy it here first"),
    ):
        assert run(["checkpoint", *args], prog="trivet")[0] == code
        out = capsys.readouterr()
        assert text in out.out + out.err
    data = memory.cat_file("/x/one/state.pt")
    memory.pipe_file("/x/one/state.pt", data[:-1] + b"x")
    assert run(["checkpoint", "verify", "memory://x/one"], prog="trivet")[0] == 1
    with pytest.raises(CheckpointError, match=r"state\.pt is damaged"):
        make_trainer().fit(Net(), loader(), ckpt_path="memory://x/one")


def state() -> TrainState:
    return TrainState(module={"w": torch.ones(3)})


@pytest.mark.parametrize("where", ["tensors/.metadata", "state.pt", "manifest.json"])
def test_a_save_that_breaks_off_is_no_checkpoint(where: str, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, rename = files.Remote.open, files.Remote.rename

    def no_space(path: Any, mode: str = "r", encoding: str | None = None) -> Any:
        if mode != "rb" and str(path).endswith(where):
            raise OSError("no space")
        return real(path, mode, encoding)

    def no_space_either(path: Any, new: Any) -> None:
        if str(new).endswith(where):
            raise OSError("no space")
        rename(path, new)

    directory.write("memory://x/one", state(), rank=0, world_size=1)
    monkeypatch.setattr(files.Remote, "open", no_space)
    monkeypatch.setattr(files.Remote, "rename", no_space_either)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint 'memory://x/two': .*no space"):
        directory.write("memory://x/two", state(), rank=0, world_size=1)
    assert names(memory, "/x") == ["one"]


def test_sweep_removes_what_dead_saves_left_and_nothing_else(memory: Any) -> None:
    directory.write("memory://x/good", state(), rank=0, world_size=1)
    host = os.uname().nodename if sys.platform != "win32" else ""
    for name, mark in {
        "dead": {"host": host, "process": 2**22 + 1, "time": time.time()},
        "live": {"host": host, "process": os.getpid(), "time": time.time()},
        "elsewhere": {"host": "another", "process": 1, "time": time.time() - 60},
        "long ago": {"host": "another", "process": 1, "time": time.time() - 1e6},
    }.items():
        memory.pipe_file(f"/x/{name}/{MARKER}", json.dumps(mark).encode())
        memory.pipe_file(f"/x/{name}/tensors/__0_0.distcp", b"half")
    memory.pipe_file("/x/thesis/chapter", b"words")
    removed = {path.name for path in directory.sweep("memory://x")}
    assert removed == {"dead", "long ago"}
    assert names(memory, "/x") == ["elsewhere", "good", "live", "thesis"]
    assert places.taken(files.place("memory://x/live"))


def test_deleting_takes_the_manifest_first(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write("memory://x/one", state(), rank=0, world_size=1)
    monkeypatch.setattr(files.Remote, "remove", lambda path: (_ for _ in ()).throw(OSError("lost")))
    with pytest.raises(OSError, match="lost"):
        directory.delete(files.place("memory://x/one"))
    assert not directory.complete("memory://x/one")


def test_without_fsspec_and_of_unknown_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"'nowhere://x'.*[Pp]rotocol"):
        files.place("nowhere://x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigurationError, match=r"'s3://x' needs the package fsspec.*trivet\[remote\]"):
        files.place("s3://x")


def test_file_urls_are_paths(tmp_path: Path) -> None:
    assert files.place(f"file://{tmp_path}/a") == tmp_path / "a"
    assert files.place("a") == Path("a").absolute()
