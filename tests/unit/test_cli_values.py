"""The values of a command line: where they come from, which of them rules, and how they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trivet
import yaml  # type: ignore[import-untyped]
from trivet.callbacks.early_stopping import EarlyStopping
from trivet.callbacks.timer import Timer
from trivet.commands import entry
from trivet.loggers.csv import CSVLogger


class Net(trivet.Module):
    def __init__(self, lr: float = 0.1, width: int = 4, hiddenDim: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.fixture(autouse=True)
def fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every fit is recorded instead of run: (trainer, module)."""
    calls: list[Any] = []
    monkeypatch.setattr(trivet.Trainer, "fit", lambda self, module, **rest: calls.append((self, module)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return calls


def fit(*argv: str, command: str = "fit", **script: Any) -> trivet.Trainer:
    trainer = trivet.cli(Net, args=[command, *argv], trainer_defaults={"max_epochs": 1, "accelerator": "cpu"}, **script)
    assert trainer is not None
    return trainer


def refused(capsys: pytest.CaptureFixture[str], *argv: str, **script: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        fit(*argv, **script)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def shown(capsys: pytest.CaptureFixture[str], *argv: str, **script: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        fit(*argv, **script)
    assert ended.value.code == 0
    return capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- precedence


def test_defaults_then_files_then_environment_then_flags(
    fits: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.yaml").write_text("model: {lr: 1e-3, width: 5}\nmax_epochs: 2\n")
    Path("b.yaml").write_text("model.lr: 0.2\n")
    monkeypatch.setenv("TRIVET_FIT__MODEL__LR", "0.3")
    monkeypatch.setenv("TRIVET_FIT__MODEL__HIDDENDIM", "7")
    monkeypatch.setenv("TRIVET_VALIDATE__MODEL__LR", "9")
    files = ["--config", "a.yaml", "--config", "b.yaml"]
    fit(*files)
    assert vars(fits[-1][1].hparams) == {"lr": 0.3, "width": 5, "hiddenDim": 7}
    fit("--model.lr", "0.4", *files)
    assert fits[-1][1].hparams.lr == 0.4
    assert fits[-1][0].max_epochs == 2
    capsys.readouterr()
    told = shown(capsys, "--model.lr", "0.4", *files, "--explain", "model.lr")
    assert [line.split() for line in told.splitlines()] == [
        ["model.lr", "=", "0.4"],
        ["0.1", "the", "default"],
        ["0.001", "a.yaml"],
        ["0.2", "b.yaml"],
        ["0.3", "TRIVET_FIT__MODEL__LR"],
        ["0.4", "--model.lr", "<-", "rules"],
    ]
    told = " ".join(shown(capsys, "--explain", "trainer.max_epochs", "--max_epochs", "3").split())
    assert told == "max_epochs = 3 1 the default of the script 3 --max_epochs <- rules"
    flags = ["--callbacks", "EarlyStopping", "--callbacks.monitor", "x", "--logger+", "csv", "--optimizer", "SGD"]
    for key, said in {
        "callbacks.monitor": "callbacks.monitor = x null the default x --callbacks.monitor <- rules",
        "callbacks.0.class_path": "early_stopping --callbacks <- rules",
        "logger.class_path": "csv --logger+ <- rules",
        "--optimizer": "torch.optim.SGD --optimizer <- rules",
        "seed_everything": "seed = 0 0 the default",
        "ckpt_path": "ckpt_path = null null the default",
        "model.init_args.width": "model.width = 5 4 the default 5 a.yaml <- rules",
    }.items():
        assert said in " ".join(shown(capsys, *flags, *files, "--explain", key).split())
    everything = shown(capsys, *files, "--explain")
    assert "model.width = 5" in everything
    assert "num_nodes" not in everything
    assert "Did you mean model.lr?" in refused(capsys, "--explain", "model.lrr")


def test_a_plan_reads_the_environment_of_the_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIVET_FIT__PRECISION", "fp64")
    assert entry.run(["plan", "--accelerator", "cpu", "--json"], prog="trivet")[0] == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "fp64"


def test_names_in_the_environment_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIVET_FIT__MODEL__WITH", "3")
    assert "TRIVET_FIT__MODEL__WITH is not known. Did you mean TRIVET_FIT__MODEL__WIDTH?" in refused(capsys)
    monkeypatch.delenv("TRIVET_FIT__MODEL__WITH")
    monkeypatch.setenv("TRIVET_FIT__MODEL__WIDTH", "wide")
    assert "TRIVET_FIT__MODEL__WIDTH='wide'. Expected int." in refused(capsys)


def test_values_as_they_are_typed(fits: list[Any]) -> None:
    """What YAML and unions of types make of the words of a terminal."""
    for words, name, value in (
        (["--max_time", "90"], "limits.max_seconds", 90.0),
        (["--max_time", "10 min"], "limits.max_seconds", 600.0),
        (["--max_time", "{minutes: 3}"], "limits.max_seconds", 180.0),
        (["--limit_train_batches", "1"], "limit_train_batches", 1),
        (["--limit_train_batches", "1.0"], "limit_train_batches", 1.0),
        (["--val_check_interval", "100 updates"], "val_check_interval", "100 updates"),
        (["--val_check_interval", "0.5"], "val_check_interval", 0.5),
        (["--max-epochs", "7"], "max_epochs", 7),
        (["--deterministic", "warn"], "deterministic", "warn"),
        (["--compile", "{mode: default}"], "compile", {"mode": "default"}),
        (["--optimizer", "SGD", "--gradient_clip_val=.5"], "clip.value", 0.5),
    ):
        found: Any = fit(*words)
        for part in name.split("."):
            found = getattr(found, part)
        assert (found, type(found)) == (value, type(value)), words


def test_a_flag_that_is_given_twice_is_told(fits: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit("--max_epochs", "3", "--model.lr", "1", "--trainer.max_epochs=5", "--model.lr", "1")
    assert trainer.max_epochs == 5
    said = capsys.readouterr().err
    assert "--trainer.max_epochs is given twice, as '3' and '5'. The last one rules." in said
    assert "--model.lr" not in said


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_file_written_for_lightning_is_read(fits: list[Any]) -> None:
    Path("run.yaml").write_text(
        """
seed_everything: true
trainer:
  max_epochs: 3
  precision: 16-mixed
  callbacks:
  - class_path: lightning.pytorch.callbacks.EarlyStopping
    init_args: {monitor: val/loss, patience: 2}
  logger:
    class_path: pytorch_lightning.loggers.CSVLogger
    init_args: {save_dir: logs, name: x}
model: {lr: 0.5}
optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.25}}
validate: {ckpt_path: nowhere}
"""
    )
    trainer = fit("--config", "run.yaml", "--trainer.max_epochs=4", "--seed_everything", "7")
    assert (trainer.max_epochs, trainer.plan().precision) == (4, "fp16-mixed")
    (stopping,) = trainer.early_stopping_callbacks
    assert (stopping.monitor, stopping.patience) == ("val/loss", 2)
    assert isinstance(trainer.logger, CSVLogger)
    assert (trainer.logger.save_dir, trainer.logger.name) == ("logs", "x")
    assert fits[0][1].hparams.lr == 0.5
    assert trainer.config["seed"] == 7


def test_nested_unknown_keys_of_files_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("model: {learning_rate: 1, withd: 2}")
    assert "a.yaml: model.learning_rate is not known." in refused(capsys, "--config", "a.yaml")
    Path("a.yaml").write_text("trainer: {max_epoch: 1}")
    assert "a.yaml: max_epoch is not known. Did you mean max_epochs?" in refused(capsys, "--config", "a.yaml")
    Path("a.yaml").write_text("callbacks: [{class_path: EarlyStopping, init_args: {moniter: x}}]")
    assert "callbacks.0.moniter is not known. Did you mean callbacks.monitor?" in refused(capsys, "-c", "a.yaml")
    Path("a.yaml").write_text("callbacks: [{monitor: x}]")
    assert "callbacks.0 names no plugin (a.yaml)" in refused(capsys, "-c", "a.yaml")


def test_what_is_printed_can_be_given_again(fits: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--callbacks", "EarlyStopping", "--callbacks.monitor", "x", "--callbacks+=Timer", "--logger", "csv"]
    flags += ["--logger.name", "mine", "--optimizer", "AdamW", "--lr_scheduler", "StepLR", "--model.lr", "1e-5"]
    flags += ["--lr_scheduler.step_size", "2", "--strategy", "ddp", "--devices", "2", "--limit_val_batches", "3"]
    printed = shown(capsys, *flags, "--print_config")
    Path("all.yaml").write_text(printed)
    assert yaml.safe_load(printed)["callbacks"][0]["init_args"]["monitor"] == "x"
    assert yaml.safe_load(printed)["max_time"] is None  # every value
    assert shown(capsys, "--config", "all.yaml", "--print_config") == printed
    assert fit("--config", "all.yaml").config == fit(*flags).config == yaml.safe_load(printed)


# -------------------------------------------------------------------------------------------------------------- several


def test_callbacks_in_every_spelling(fits: list[Any]) -> None:
    for flags in (
        ["--callbacks", "EarlyStopping", "--callbacks.monitor", "a", "--callbacks", "Timer"],
        ["--callbacks+=early_stopping", "--callbacks.monitor=a", "--callbacks+=Timer"],
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.init_args.monitor=a", "--callbacks+=Timer"],
        ["--callbacks", "[{class_path: EarlyStopping, init_args: {monitor: a}}, Timer]"],
        ["--callbacks", "EarlyStopping", "--callbacks+", "Timer", "--callbacks.0.monitor", "a"],
    ):
        trainer = fit(*flags)
        own = [one for one in trainer.callbacks if isinstance(one, (EarlyStopping, Timer))]
        assert [type(one) for one in own] == [EarlyStopping, Timer]
        assert trainer.early_stopping_callback.monitor == "a"


def test_flags_change_add_to_or_replace_the_callbacks_of_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.yaml").write_text("callbacks:\n- {class_path: EarlyStopping, init_args: {monitor: a}}\n")
    Path("b.yaml").write_text("callbacks+: Timer\n")
    both = ["--config", "a.yaml", "--config", "b.yaml"]
    trainer = fit(*both, "--callbacks.0.monitor", "b", "--callbacks.interval", "epoch")
    assert trainer.early_stopping_callback.monitor == "b"
    assert [one.interval for one in trainer.callbacks if isinstance(one, Timer)] == ["epoch"]
    monkeypatch.setenv("TRIVET_FIT__CALLBACKS__INTERVAL", "epoch")
    trainer = fit(*both, "--callbacks", "EarlyStopping", "--callbacks.monitor", "c")
    assert [one.monitor for one in trainer.early_stopping_callbacks] == ["c"]
    assert not any(isinstance(one, Timer) for one in trainer.callbacks)
    monkeypatch.delenv("TRIVET_FIT__CALLBACKS__INTERVAL")
    assert "Add --callbacks NAME before it." in refused(capsys, "--callbacks.monitor", "a")
    assert "no callback is named 'Timr'. Did you mean 'timer'?" in refused(capsys, "--callbacks", "Timr")


def test_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit("--logger", "csv", "--logger.name", "x", "--logger+", "csv", "--logger.version", "run")
    assert [(one.name, str(one.log_dir)) for one in trainer.loggers if one.name == ""] == [("", "trivet_runs/run")]
    assert [one.name for one in trainer.loggers] == ["x", ""]
    assert fit("--logger", "false").loggers == fit("--logger", "[]").loggers == []
    assert len(fit("--callbacks", "[]").callbacks) == len(fit().callbacks)
    assert len(fit("--logger", "true").loggers) == len(fit().loggers) == 1
    Path("a.yaml").write_text("logger: false")
    assert fit("--config", "a.yaml").loggers == []
    assert len(fit("--config", "a.yaml", "--logger", "csv").loggers) == 1
    assert "--logger.nam is not known. Did you mean --logger.name?" in refused(
        capsys, "--logger", "csv", "--logger.nam", "x"
    )


# -------------------------------------------------------------------------------------------------------------- scripts


class Base(trivet.Module):
    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.lr = lr


class Deep(Base):
    def __init__(self, depth: int = 2, **rest: Any) -> None:
        super().__init__(**rest)
        self.depth = depth


def test_subclasses_are_named_shortly(fits: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    args = ["fit", "--max_epochs", "1", "--model", "Deep", "--model.lr", "3", "--model.depth", "4"]
    trivet.cli(Base, args=args, subclasses=True)
    assert (fits[0][1].lr, fits[0][1].depth) == (3.0, 4)
    with pytest.raises(SystemExit):
        trivet.cli(Base, args=["fit", "--model", f"{__name__}.Net"], subclasses=True)
    assert f"Expected a subclass of {__name__}.Base" in capsys.readouterr().err


def test_objects_among_the_defaults_of_a_script(fits: list[Any]) -> None:
    defaults = {"max_epochs": 1, "callbacks": [Timer(), "EarlyStopping"], "logger": False}
    trainer = trivet.cli(Net, args=["fit", "--callbacks.monitor", "x"], trainer_defaults=defaults)
    assert trainer is not None
    assert trainer.loggers == []
    assert [type(one) for one in trainer.callbacks if isinstance(one, (Timer, EarlyStopping))] == [Timer, EarlyStopping]
    args = ["fit", "--callbacks", "EarlyStopping", "--callbacks.monitor", "y"]
    trainer = trivet.cli(Net, args=args, trainer_defaults=defaults)
    assert trainer is not None
    assert [one.monitor for one in trainer.early_stopping_callbacks] == ["y"]


def test_help_of_every_command_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("fit", "validate", "test", "predict", "plan"):
        flags = ["--callbacks", "EarlyStopping", "--optimizer", "AdamW", "--lr_scheduler", "StepLR", "--logger", "csv"]
        with pytest.raises(SystemExit) as ended:
            trivet.cli(Net, args=[command, "--help", *flags])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80
        for flag in ("--callbacks.monitor MONITOR", "--optimizer CLASS", "--lr_scheduler.step_size", "--max_epochs"):
            assert flag in text
        assert not any(
            noise in text for noise in ("known subclasses", "(type:", "default: None", "default: null", "+ DEVICES")
        )
        assert "--num_nodes INT " in text
        assert ".help" not in text
    import inspect

    assert all(f"--{name}" in text for name in inspect.signature(trivet.Trainer).parameters)


def test_a_command_after_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["--config", "a.yaml", "fit"], prog="trivet")[0] == 2
    assert "--config stands before the command." in capsys.readouterr().err
