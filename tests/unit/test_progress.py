"""The progress bar: quiet lines, the bar on a terminal, and what it must never do."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from trivet.callbacks.progress import ProgressBar, format_value
from trivet.state import Progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class FakeTrainer(SimpleNamespace):
    """What the bar reads of a Trainer; counts how often metrics are fetched."""

    def __init__(self, **values: Any) -> None:
        self.fetched = 0
        defaults: dict[str, Any] = {
            "is_global_zero": True, "max_epochs": 3, "current_epoch": 0, "num_updates": 4, "sanity_checking": False,
        }  # fmt: skip
        super().__init__(progress=Progress(), **{**defaults, **values})

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        self.fetched += 1
        return {"loss": 0.123456, "steps": 7.0}


def run_epoch(bar: ProgressBar, trainer: Any, updates: int = 4) -> None:
    bar.on_train_epoch_start(trainer, None)  # type: ignore[arg-type]
    for _ in range(updates):
        trainer.progress.epoch_update += 1
        bar.on_update_end(trainer, None)  # type: ignore[arg-type]
    bar.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]


def start(bar: ProgressBar, trainer: Any) -> None:
    bar.on_fit_start(trainer, None)  # type: ignore[arg-type]
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Called in a test, makes standard output a terminal; pytest itself replaces it again after the fixtures."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)

    def install() -> Terminal:
        stream = Terminal()
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    return install


def test_one_quiet_line_per_epoch_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar, trainer = ProgressBar(), FakeTrainer()
    start(bar, trainer)
    run_epoch(bar, trainer)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("epoch 1/3: 4/4 updates, ")
    assert lines[0].endswith(" it/s, loss 0.1235, steps 7")
    assert trainer.fetched == 1


def test_a_long_epoch_writes_lines_in_between(capsys: pytest.CaptureFixture[str]) -> None:
    bar, trainer = ProgressBar(line_interval=0.0), FakeTrainer(num_updates=None, max_epochs=None)
    start(bar, trainer)
    run_epoch(bar, trainer, updates=2)
    heads = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert heads == ["epoch 1: 1 updates", "epoch 1: 2 updates", "epoch 1: 2 updates"]


def test_other_ranks_are_silent(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    bar, trainer = ProgressBar(), FakeTrainer(is_global_zero=False)
    start(bar, trainer)
    run_epoch(bar, trainer)
    bar.on_validation_start(trainer, None)  # type: ignore[arg-type]
    bar.on_validation_end(trainer, None)  # type: ignore[arg-type]
    assert screen.getvalue() == ""
    assert trainer.fetched == 0


def test_the_bar_on_a_terminal(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    bar, trainer = ProgressBar(), FakeTrainer()
    start(bar, trainer)
    run_epoch(bar, trainer)
    print("[bold]what the user prints[/bold]")
    bar.on_validation_start(trainer, None)  # type: ignore[arg-type]
    bar.on_validation_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    bar.on_validation_end(trainer, None)  # type: ignore[arg-type]
    bar.on_train_end(trainer, None)  # type: ignore[arg-type]
    text = screen.getvalue()
    assert "epoch 1/3" in text
    assert "4/4" in text
    assert "loss 0.1235, steps 7" in text
    assert "[bold]what the user prints[/bold]" in text
    assert sys.stdout is screen


def test_updates_between_two_refreshes_fetch_nothing(terminal: Callable[[], Terminal]) -> None:
    terminal()
    bar, trainer = ProgressBar(refresh_interval=3600.0), FakeTrainer(num_updates=100)
    start(bar, trainer)
    run_epoch(bar, trainer, updates=100)
    bar.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    assert trainer.fetched == 1  # at the end of the epoch


def test_an_exception_removes_the_bar(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    bar, trainer = ProgressBar(), FakeTrainer()
    start(bar, trainer)
    assert sys.stdout is not screen  # rich redirects what is printed
    bar.on_exception(trainer, None, ValueError())  # type: ignore[arg-type]
    assert sys.stdout is screen
    bar.teardown(trainer, None, "fit")  # type: ignore[arg-type]


class OnlyWrites:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_any_standard_output_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = OnlyWrites()
    for out in (None, stream):
        monkeypatch.setattr(sys, "stdout", out)
        bar, trainer = ProgressBar(), FakeTrainer()
        start(bar, trainer)
        run_epoch(bar, trainer)
        bar.on_train_end(trainer, None)  # type: ignore[arg-type]
    assert stream.text.startswith("epoch 1/3")


def test_a_notebook_is_no_terminal(terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal()
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    bar, trainer = ProgressBar(), FakeTrainer()
    start(bar, trainer)
    run_epoch(bar, trainer)
    assert screen.getvalue().startswith("epoch 1/3: 4/4 updates")


def test_validation_alone_shows_a_bar(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    bar, trainer = ProgressBar(), FakeTrainer()
    bar.on_validation_start(trainer, None)  # type: ignore[arg-type]
    bar.on_validation_end(trainer, None)  # type: ignore[arg-type]
    bar.teardown(trainer, None, "validate")  # type: ignore[arg-type]
    assert sys.stdout is screen


def test_a_started_bar_pickles(terminal: Callable[[], Terminal]) -> None:
    terminal()
    bar, trainer = ProgressBar(), FakeTrainer()
    start(bar, trainer)
    copy = pickle.loads(pickle.dumps(bar))
    bar.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    assert copy.refresh_interval == bar.refresh_interval


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (12.0, "12"), (1e-7, "1e-07"), (0.98764, "0.9876"), (float("nan"), "nan")]
)
def test_metrics_have_four_digits(value: float, text: str) -> None:
    assert format_value(value) == text
