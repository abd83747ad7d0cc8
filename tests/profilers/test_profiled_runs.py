"""Runs under a profiler: what it sees, that nothing else changes, and that a run without one is untouched."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from ranks import on_two_ranks
from torch.utils.data import DataLoader, TensorDataset
from trivet.profilers import PassThroughProfiler, SimpleProfiler


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("my own"):
            return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Own(trivet.Callback):
    def on_train_batch_end(self, *args: Any) -> None: ...

    def on_after_backward(self, *args: Any) -> None: ...


class Spy(trivet.Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.wrapped = not inspect.ismethod(module._run.optimizer_step)


def fit(root: Any, profiler: Any, *callbacks: Any, **flags: Any) -> tuple[torch.Tensor, trivet.Trainer]:
    torch.manual_seed(1)
    net, data = Net(), DataLoader(TensorDataset(torch.randn(16, 2)), 2)
    trainer = trivet.Trainer(
        accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, profiler=profiler, callbacks=list(callbacks),
        default_root_dir=root, enable_progress_bar=False, enable_checkpointing=False, **flags,
    )  # fmt: skip
    trainer.fit(net, data, data)
    return net.layer.weight.detach().clone(), trainer


def test_what_it_sees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight, trainer = fit(tmp_path, "simple", Own())
    assert isinstance(trainer.profiler, SimpleProfiler)
    calls = {action: count for action, (count, _) in trainer.profiler.durations.items()}
    assert calls == {
        "fetch": 18,  # and the end of each epoch
        "forward_backward": 16,
        "optimizer_step": 16,
        "my own": 16,
        "validation": 2,
        "validation_step": 16,
        "Own.on_train_batch_end": 16,
        "Own.on_after_backward": 16,
    }
    text = capsys.readouterr().out
    assert all(action in text for action in calls)
    assert torch.equal(weight, fit(tmp_path, None)[0])


def test_none_is_not_there(tmp_path: Path) -> None:
    spy, trainer = fit(tmp_path, None, Spy())[1].callbacks[0], None
    assert not spy.wrapped
    spy, trainer = fit(tmp_path, "simple", Spy())[1].callbacks[0], None
    assert spy.wrapped
    _, trainer = fit(tmp_path, None)
    assert type(trainer.profiler) is PassThroughProfiler


def test_every_function_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, "advanced")
    assert "training_step" in capsys.readouterr().out
    assert sys.getprofile() is None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_operators_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, trainer = fit(tmp_path, "pytorch")
    out = capsys.readouterr().out
    assert "aten::addmm" in out
    assert "forward_backward" in out
    assert (Path(trainer.log_dir) / "trace-0-0.json").is_file()


class Fails(trivet.Callback):
    def on_train_start(self, *args: Any) -> None:
        raise ValueError("on purpose")


def test_a_run_that_fails_is_described_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        fit(tmp_path, "advanced", Fails())
    assert "Profile of fit" in capsys.readouterr().out
    assert sys.getprofile() is None


def files(root: Any) -> int:
    profiler = SimpleProfiler(filename="times")
    fit(root, profiler, strategy="ddp")
    return profiler.durations["optimizer_step"][0]


def test_all_ranks_write_beside_each_other(tmp_path: Path) -> None:
    assert on_two_ranks(files, tmp_path) == [8, 8]
    names = sorted(path.name for path in (tmp_path / "version_0").glob("*.txt"))
    assert names == ["fit-times-0.txt", "fit-times-1.txt"]
