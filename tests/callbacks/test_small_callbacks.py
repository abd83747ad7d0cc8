"""LearningRateMonitor, Timer, LambdaCallback, and all of them by name."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from callback_runs import Net, loader, trainer
from trivet import callbacks
from trivet.callbacks import LambdaCallback, LearningRateMonitor, Timer
from trivet.callbacks.learning_rate import group_names, named
from trivet.configured import Schedule
from trivet.errors import ConfigurationError


def test_every_exported_name_can_be_had_and_is_a_callback() -> None:
    for name in callbacks.__all__:
        assert isinstance(getattr(callbacks, name), type), name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        callbacks.Nothing  # noqa: B018


@pytest.mark.parametrize("name", ["timer", "Timer", "trivet:timer", "LearningRateMonitor"])
def test_by_name(tmp_path: Path, name: str) -> None:
    made = trainer(tmp_path, name)
    assert type(made.callbacks[0]).__name__.lower() in name.lower()


def test_by_class_name_with_options(tmp_path: Path) -> None:
    made = trainer(tmp_path, {"name": "EarlyStopping", "monitor": "val/loss", "patience": 7})
    assert made.callbacks[0].patience == 7


# ----------------------------------------------------------------------------------------------- LearningRateMonitor


def rows(made: trivet.Trainer, key: str) -> list[tuple[int, float]]:
    with open(Path(made.log_dir) / "metrics.csv", newline="") as file:
        return [(int(row["step"]), float(row[key])) for row in csv.DictReader(file) if row.get(key)]


def test_rates_are_in_the_row_of_the_update_that_they_made(tmp_path: Path) -> None:
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    made = trainer(tmp_path, monitor, max_epochs=1, logger=True)
    made.fit(Net(schedule="step"), loader())
    rates = [0.1 * 0.5**3, 0.1 * 0.5**7]
    assert rows(made, "lr-SGD") == list(zip([4, 8], rates, strict=True))
    assert [step for step, _ in rows(made, "loss_step")] == [4, 8]
    assert rows(made, "lr-SGD-momentum") == [(4, 0.9), (8, 0.9)]
    assert monitor.lrs == {"lr-SGD": rates}
    assert monitor.last_weight_decay_values == {"lr-SGD-weight_decay": 0.01}
    assert made.callback_metrics["lr-SGD"] == rates[1]


@pytest.mark.parametrize("interval", [None, "epoch"])
def test_rates_of_epochs(tmp_path: Path, interval: str | None) -> None:
    made = trainer(tmp_path, LearningRateMonitor(interval), max_epochs=2, logger=True)
    made.fit(Net(schedule="epoch"), loader())
    assert rows(made, "lr-SGD") == [(8, 0.1), (16, 0.05)]


def test_names() -> None:
    def optimizer(*names: str | None) -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], **({"name": n} if n else {})} for n in names]
        return torch.optim.SGD(groups, lr=0.1)

    first, second, third = optimizer(None), optimizer(None, None), optimizer("head", None)
    scheduled = Schedule(torch.optim.lr_scheduler.StepLR(third, 1), name="warmup")
    found = named([first, second, third], [scheduled])
    assert [(name, group_names(name, one)) for name, one in found] == [
        ("warmup", ["warmup/head", "warmup/pg2"]),
        ("lr-SGD", ["lr-SGD"]),
        ("lr-SGD-1", ["lr-SGD-1/pg1", "lr-SGD-1/pg2"]),
    ]
    with pytest.raises(ConfigurationError, match="have the name 'head'"):
        group_names("x", optimizer("head", "head"))


def test_an_unknown_interval() -> None:
    with pytest.raises(ConfigurationError, match="logging_interval='batch'"):
        LearningRateMonitor("batch")


# ------------------------------------------------------------------------------------------------------------- Timer


def test_the_timer_ends_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = Timer(timedelta(seconds=0))
    made = trainer(tmp_path, timer)
    made.fit(Net(), loader())
    assert made.global_step == 0
    assert "have passed" in capsys.readouterr().out
    timer = Timer("00:00:00:00", interval="epoch", verbose=False)
    LambdaCallback()
    made = trainer(tmp_path, timer, min_epochs=2)
    made.fit(Net(), loader())
    assert made.current_epoch == 2


def test_it_measures_stages_and_remembers(tmp_path: Path) -> None:
    timer = Timer({"hours": 1})
    trainer(tmp_path, timer, max_epochs=1).fit(Net(), loader(), loader(8))
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed("train") < 60
    assert timer.time_elapsed("test") == 0
    assert timer.start_time("train") < timer.end_time("train")
    remaining = timer.time_remaining()
    assert remaining is not None
    assert 3500 < remaining < 3600
    again = Timer()
    again.load_state_dict({"time_elapsed": {"train": 100.0}})
    assert again.time_elapsed() == 100.0
    assert again.time_remaining() is None


@pytest.mark.parametrize("duration", ["1:00", "1 hour"])
def test_a_wrong_duration(duration: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected 'DD:HH:MM:SS'"):
        Timer(duration)


# ---------------------------------------------------------------------------------------------------- LambdaCallback


def test_functions_become_hooks(tmp_path: Path) -> None:
    seen: list[Any] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: seen.append("start"),
        on_train_batch_end=lambda trainer, module, outputs, batch, index: seen.append(index),
        on_train_end=None,
    )
    trainer(tmp_path, callback, max_epochs=1).fit(Net(), loader(8))
    assert seen == ["start", 0, 1]


def test_a_function_for_no_hook() -> None:
    with pytest.raises(ConfigurationError, match="no hook is named 'on_trian_end'"):
        LambdaCallback(on_trian_end=print)


def test_several_that_keep_no_state(tmp_path: Path) -> None:
    seen: list[int] = []
    several = [LambdaCallback(on_train_end=lambda trainer, module, n=n: seen.append(n)) for n in range(3)]
    trainer(tmp_path, *several, max_epochs=1).fit(Net(), loader(8))
    assert seen == [0, 1, 2]
