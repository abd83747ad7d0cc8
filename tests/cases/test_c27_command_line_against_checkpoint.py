"""C27: a run goes on from a checkpoint that was made with another learning rate than the command line gives."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import trivet
from torch.utils.data import DataLoader
from trivet.checkpoint import directory
from trivet.commands import entry


class Net(trivet.Module):
    def __init__(self, lr: float = 0.1, width: int = 1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, width)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.5)

    def train_dataloader(self):
        return DataLoader([torch.tensor([float(i)]) for i in range(4)], 2)


class Seen(trivet.Callback):
    """The learning rate that each update was made with."""

    def __init__(self):
        self.lrs = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.lrs.append(optimizer.param_groups[0]["lr"])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


FLAGS = ["--accelerator", "cpu", "--devices", "1", "--enable_progress_bar", "false", "--callbacks", f"{__name__}.Seen"]


def fit(*argv, model="Net"):
    code, trainer = entry.run(["fit", *FLAGS, "--model", f"{__name__}.{model}", *argv], prog="trivet")
    assert code == 0
    lrs = next(callback.lrs for callback in trainer.callbacks if isinstance(callback, Seen))
    return trainer, trainer.module.hparams.lr, lrs


def saved(trainer):
    return trainer.checkpoint_callback.best_model_path or trainer.checkpoint_callback.last_model_path


@pytest.fixture
def checkpoint():
    return saved(fit("--max_epochs", "1", "--model.lr", "1.0")[0])


def test_the_flag_rules_the_model_and_what_it_is_trained_with(checkpoint, capsys):
    trainer, lr, lrs = fit("--max_epochs", "2", "--ckpt_path", checkpoint, "--model.lr", "0.5")
    assert (trainer.progress.update, lr, lrs) == (4, 0.5, [0.5, 0.5])
    assert "changed since the checkpoint: lr=0.5" in capsys.readouterr().err
    _, lr, lrs = fit("--max_epochs", "3", "--ckpt_path", saved(trainer), "--model.lr", "0.5")
    assert (lr, lrs) == (0.5, [0.5, 0.5])
    assert "changed" not in capsys.readouterr().err


def test_the_default_rules_where_no_flag_is_given(checkpoint):
    _, lr, lrs = fit("--max_epochs", "2", "--ckpt_path", checkpoint)
    assert (lr, lrs) == (0.1, [0.1, 0.1])


def test_a_schedule_goes_on_where_it_was(capsys):
    flags = ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1", "--lr_scheduler.gamma", "0.5"]
    first = saved(fit("--max_epochs", "1", "--model.lr", "1.0", *flags)[0])
    _, lr, lrs = fit("--max_epochs", "3", "--ckpt_path", first, "--model.lr", "0.8", *flags)
    assert (lr, lrs) == (0.8, [0.4, 0.4, 0.2, 0.2])
    flags[-1] = "0.1"
    _, lr, lrs = fit("--max_epochs", "3", "--ckpt_path", first, "--model.lr", "1.0", *flags)
    assert lrs == pytest.approx([0.5, 0.5, 0.05, 0.05])
    assert "changed since the checkpoint: gamma=0.1" in capsys.readouterr().err


def test_the_checkpoints_own_value_is_asked_for(checkpoint, monkeypatch, capsys):
    Path("a.yaml").write_text("model: {lr: 0.2, width: 1}\n")
    resume = ["--max_epochs", "2", "--ckpt_path", checkpoint, "--config", "a.yaml"]
    assert fit(*resume)[1] == 0.2
    resume += ["--ckpt_hparams", "true"]
    assert fit(*resume)[1] == 1.0  # above files
    monkeypatch.setenv("TRIVET_FIT__MODEL__LR", "0.3")
    assert fit(*resume)[1] == 0.3
    assert fit(*resume, "--model.lr", "0.5")[1:] == (0.5, [0.5, 0.5])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        entry.run(["fit", *FLAGS, "--model", f"{__name__}.Net", *resume, "--explain", "model.lr"], prog="trivet")
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    chain = f"0.1 the default 0.2 a.yaml 1.0 the checkpoint {checkpoint} 0.3 TRIVET_FIT__MODEL__LR <- rules"
    assert told == f"model.lr = 0.3 {chain}"


def test_the_same_command_twice_neither_overwrites_nor_refuses(checkpoint):
    command = ["--max_epochs", "2", "--ckpt_path", checkpoint, "--model.lr", "0.5"]
    first, second = (fit(*command)[0] for _ in range(2))
    assert first.log_dir != second.log_dir
    assert saved(first) != saved(second)
    for trainer in (first, second):
        assert Path(trainer.log_dir, "config.yaml").exists()
        assert directory.complete(saved(trainer))
    assert directory.complete(checkpoint)


def test_also_where_nothing_tells_runs_apart():
    command = ["--max_epochs", "1", "--logger", "false"]
    first = fit(*command)[0]
    assert directory.complete(saved(first))
    second = fit(*command)[0]
    assert saved(first) != saved(second)
    assert directory.complete(saved(first))
    assert sorted(path.name for path in Path("trivet_runs").glob("config*")) == ["config-2.yaml", "config.yaml"]


class Activated(Net):
    """Of which an argument is a function."""

    def __init__(self, lr: float = 0.1, act: Callable = torch.tanh):
        super().__init__(lr)
        self.save_hyperparameters()


@pytest.mark.parametrize("act", ["torch.relu", "torch.nn.functional.silu"])
def test_functions_come_back_by_the_path_they_were_stored_by(act):
    first = saved(fit("--max_epochs", "1", "--model.act", act, model="Activated")[0])
    trainer = fit("--max_epochs", "2", "--ckpt_path", first, "--ckpt_hparams", "true", model="Activated")[0]
    assert trainer.module.hparams.act is attrgetter(act.removeprefix("torch."))(torch)
