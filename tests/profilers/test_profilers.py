"""What profilers measure, print and write, apart from a Trainer."""

from __future__ import annotations

import json
import pickle
import pstats
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trivet import profilers
from trivet.errors import ConfigurationError
from trivet.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler


def spend() -> None:
    time.sleep(0.001)


def test_names() -> None:
    assert profilers.make(None) is None
    assert {name: type(profilers.make(name)) for name in profilers.NAMES} == profilers.NAMES
    own = SimpleProfiler()
    assert profilers.make(own) is own
    for wrong in ("simpel", 3):
        with pytest.raises(ConfigurationError, match="expected 'simple', 'advanced', 'pytorch'"):
            profilers.make(wrong)  # type: ignore[arg-type]


def test_times_and_calls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    profiler.setup("fit", 0, tmp_path)
    for _ in range(3):
        with profiler.profile("outer"), profiler.profile("inner"):
            spend()
    with pytest.raises(ValueError, match="on purpose"), profiler.profile("fails"):
        raise ValueError("on purpose")
    profiler.stop("never began")
    assert [calls for calls, _ in profiler.durations.values()] == [3, 3, 1]
    assert profiler.durations["outer"][1] >= profiler.durations["inner"][1] >= 0.003
    profiler.describe()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(" | ")[0].strip() == "Action"
    assert [line.split()[0] for line in lines[3:]] == ["outer", "inner", "fails"]
    assert [line.split(" | ")[2].strip() for line in lines[3:]] == ["3", "3", "1"]


def test_an_action_within_itself(tmp_path: Path) -> None:
    profiler = SimpleProfiler(extended=False)
    profiler.setup("fit", 0, tmp_path)
    with profiler.profile("a"), profiler.profile("a"):
        pass
    assert profiler.durations["a"][0] == 2
    assert "Calls" not in profiler.summary()


def test_files_on_every_rank_and_print_on_rank_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        profiler = SimpleProfiler(tmp_path / "out", "times")
        profiler.setup("validate", rank, tmp_path)
        with profiler.profile("a"):
            pass
        profiler.describe()
        silent = SimpleProfiler()
        silent.setup("fit", 1, tmp_path)
        silent.describe()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "validate-times-0.txt",
        "validate-times-1.txt",
    ]
    assert capsys.readouterr().out == ""


def test_every_function(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, line_count_restriction=10, dump_stats=True)
    profiler.setup("fit", 0, tmp_path)
    with profiler.profile("ignored"):
        spend()
    text = profiler.summary()
    profiler.teardown()
    assert "spend" in text
    assert "cumulative" in text
    pstats.Stats(str(tmp_path / "fit-profile-0.prof"))
    profiler.setup("fit", 0, tmp_path)  # another run
    profiler.teardown()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_operators_and_a_trace(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, row_limit=50)
    profiler.setup("fit", 0, tmp_path)
    for _ in range(6):
        with profiler.profile("multiply"):
            torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.step()
    text = profiler.summary()
    profiler.teardown()
    assert "aten::mm" in text
    assert "multiply" in text
    events = json.loads((tmp_path / "trace-0-0.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "multiply" and event.get("cat") == "user_annotation" for event in events) == 3


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_an_evaluation_is_recorded_as_a_whole(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, export_to_chrome=False)
    profiler.setup("validate", 0, tmp_path)
    profiler.start("left open")
    torch.ones(4) + 1
    assert "aten::add" in profiler.summary()
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_torch_does_not_have(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(with_colours=True)
    with pytest.raises(ConfigurationError, match="with_colours"):
        profiler.setup("fit", 0, tmp_path)


@pytest.mark.parametrize("profiler", [SimpleProfiler(), AdvancedProfiler(), PyTorchProfiler(), PassThroughProfiler()])
def test_they_travel_to_workers(profiler: Profiler) -> None:
    assert type(pickle.loads(pickle.dumps(profiler))) is type(profiler)
    with PassThroughProfiler().profile("anything"):
        pass


class Owner:
    def on_train_start(self, *args: Any) -> None:
        spend()


class Recorder(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def start(self, action: str) -> None:
        self.seen.append(f"<{action}")

    def stop(self, action: str) -> None:
        self.seen.append(f"{action}>")

    def step(self) -> None:
        self.seen.append("step")


def test_what_a_run_calls() -> None:
    recorder, calls = Recorder(), []
    hooks: Any = SimpleNamespace(
        on_train_start=(partial(Owner().on_train_start, "trainer", "module"),),
        on_validation_start=(lambda: calls.append("start"),),
        on_validation_end=(),
        on_validation_batch_start=(),
        on_validation_batch_end=(),
        on_update_end=(),
    )
    profilers.attach_hooks(recorder, hooks)
    for name in ("train_start", "validation_start", "validation_batch_start", "validation_batch_end", "validation_end"):
        for hook in getattr(hooks, f"on_{name}"):
            hook()
    for hook in hooks.on_update_end:
        hook("trainer")
    assert calls == ["start"]
    assert recorder.seen == [
        "<Owner.on_train_start", "Owner.on_train_start>", "<validation", "<on_validation_start",
        "on_validation_start>", "<validation_step", "validation_step>", "validation>", "step",
    ]  # fmt: skip

    recorder.seen.clear()
    data = SimpleNamespace(epoch=lambda epoch: iter([epoch, epoch + 1]))
    run: Any = SimpleNamespace(
        transfer=None, forward_backward=lambda x: x + 1, optimizer_step=lambda x: x * 2, train_data=data
    )
    profilers.attach(recorder, run)
    assert (run.forward_backward(1), run.optimizer_step(2), list(run.train_data.epoch(3))) == (2, 4, [3, 4])
    assert recorder.seen == [
        "<forward_backward", "forward_backward>", "<optimizer_step", "optimizer_step>",
        *["<fetch", "fetch>"] * 3,
    ]  # fmt: skip
