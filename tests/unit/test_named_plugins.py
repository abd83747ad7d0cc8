"""Loggers, callbacks and launchers by name: the same listing, laziness and errors as strategies have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import scalar
import torch
import trivet
from distributions import Install
from trivet import registry
from trivet.callbacks.progress import ProgressBar
from trivet.capabilities import resolve
from trivet.commands import entry
from trivet.errors import ConfigurationError, PlanError, PluginBroken, PluginInvalid, PluginNotFound
from trivet.launch.world import World
from trivet.loggers.csv import CSVLogger

LOGGER = """
    from trivet import Logger

    class Lines(Logger):
        def __init__(self, save_dir, prefix="> "):
            self.save_dir, self.prefix = save_dir, prefix

        def log_metrics(self, metrics, step): ...
"""
CALLBACK = """
    from trivet import Callback

    class Bell(Callback):
        def __init__(self, times: int = 1):
            self.times = times
"""
LAUNCHER = """
    from trivet import Launcher
    from trivet.launch.local import launch

    class Here(Launcher):
        offers = frozenset({"several_nodes"})

        def __init__(self, patience: float = 1.0):
            self.patience = patience

        def launch(self, function, parts, plan, *, run_dir):
            print("launched with", self.patience, plan.world_size)
            launch(function, parts, plan.world_size, run_dir=run_dir)
"""


@pytest.fixture
def installed(install: Install) -> None:
    install("acme_lines", "lines = acme_lines:Lines", LOGGER, kind="logger")
    install("acme_bell", "bell = acme_bell:Bell", CALLBACK, kind="callback")
    install("acme_start", "here = acme_start:Here", LAUNCHER, kind="launcher")


def trainer(**options: Any) -> trivet.Trainer:
    return trivet.Trainer(accelerator="cpu", max_epochs=1, **options)


def kinds(made: trivet.Trainer) -> list[str]:
    """Names of the callbacks' classes, without those that report on a run and are there by default."""
    names = [type(callback).__name__ for callback in made.callbacks]
    return [name for name in names if name in ("ProgressBar", "Bell", "Checkpoint")]


def test_ours_are_registered() -> None:
    found = {kind: [e.name for e in registry.entries(kind) if e.distribution == "trivet"] for kind in registry.GROUPS}
    assert "csv" in found["logger"]
    assert {"checkpoint", "progress"} <= set(found["callback"])
    assert "torchrun" in found["environment"]
    assert "local" in found["launcher"]


def test_nothing_is_attached_or_imported_that_was_not_named(installed: None) -> None:
    made = trainer(logger="csv")
    assert kinds(made) == ["ProgressBar", "Checkpoint"]
    assert {type(callback).__module__.partition(".")[0] for callback in made.callbacks} == {"trivet"}
    assert not {"acme_lines", "acme_bell", "acme_start"} & set(sys.modules)


def test_names_and_mappings(installed: None, tmp_path: Path) -> None:
    made = trainer(
        logger=["csv", {"name": "lines", "prefix": "# "}],
        callbacks=["progress", {"name": "bell", "times": 3}, {"name": "checkpoint", "save_last": True}],
        default_root_dir=tmp_path,
        enable_model_summary=False,
    )
    csv, lines = made.loggers
    assert isinstance(csv, CSVLogger)
    assert csv.save_dir == str(tmp_path)
    assert (lines.save_dir, lines.prefix) == (tmp_path, "# ")  # type: ignore[attr-defined]
    bar, bell, checkpoint = made.callbacks
    assert isinstance(bar, ProgressBar)
    assert bell.times == 3  # type: ignore[attr-defined]
    assert made.checkpoint_callback is checkpoint
    assert checkpoint.save_last  # type: ignore[attr-defined]
    assert [c.times for c in trainer(callbacks="acme-bell:bell").callbacks if hasattr(c, "times")] == [1]
    assert trainer(logger="trivet.loggers.csv.CSVLogger").loggers[0].save_dir == "trivet_runs"  # type: ignore[attr-defined]


def test_names_on_the_command_line(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named_net.py").write_text("import trivet\nclass Net(trivet.Module): ...\n")
    monkeypatch.setattr(trivet.Trainer, "fit", lambda *args, **rest: None)

    def fit(*argv: str) -> trivet.Trainer:
        code, made = entry.run(["fit", "--model", "named_net.Net", "--max_epochs", "1", *argv], prog="trivet")
        assert code == 0, capsys.readouterr().err
        assert made is not None
        return made

    made = fit("--callbacks", "bell", "--logger", "lines")
    assert kinds(made) == ["ProgressBar", "Bell", "Checkpoint"]
    assert type(made.loggers[0]).__name__ == "Lines"
    made = fit("--callbacks+=bell", "--callbacks+=checkpoint", "--logger", "{name: lines, prefix: '- '}")
    assert kinds(made) == ["ProgressBar", "Bell", "Checkpoint"]
    assert made.loggers[0].prefix == "- "  # type: ignore[attr-defined]
    made = fit("--callbacks", "[{name: bell, times: 4}, progress]", "--logger", "false")
    assert kinds(made) == ["Bell", "ProgressBar", "Checkpoint"]
    assert [callback.times for callback in made.callbacks if hasattr(callback, "times")] == [4]
    assert made.loggers == []
    made = fit("--launcher.patience", "3", "--launcher", "here", "--devices", "2", "--accelerator", "cpu")
    assert made.resolve(None, None).launcher.plugin.patience == 3.0  # type: ignore[union-attr]
    capsys.readouterr()
    argv = ["fit", "--model", "named_net.Net", "--max_epochs", "1", "--callbacks"]
    assert entry.run([*argv, "bel"], prog="trivet")[0] == 2
    assert "no callback is named 'bel'. Did you mean 'bell'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"logger": "cvs"}, PluginNotFound, "no logger is named 'cvs'. Did you mean 'csv'"),
        ({"logger": {"name": "csv", "nmae": "x"}}, ConfigurationError, "has no option 'nmae'. Did you mean 'name'"),
        ({"callbacks": "acme.nothing.Bell"}, PluginBroken, "No module named 'acme"),
        ({"callbacks": ["trivet.loggers.csv.CSVLogger"]}, PluginInvalid, "not a subclass of trivet's Callback"),
        ({"launcher": "lokal", "devices": 2}, PluginNotFound, "no launcher is named 'lokal'. Did you mean 'local'"),
    ],
)
def test_wrong_ones(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trainer(**options)


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        (
            "logger",
            "from trivet import Logger\nclass Bad(Logger): ...",
            "does not define log_metrics, which Logger asks",
        ),
        ("logger", "Bad = 3", "names 3. Expected a class"),
        ("callback", "from trivet import Callback\nclass Bad(Callback):\n    interface = 2", "speaks interface 2"),
        (
            "callback",
            "from trivet import Callback\nclass Bad(Callback):\n    def on_update_end(self, trainer): ...",
            r"on_update_end\(self, trainer\) cannot be called as",
        ),
        ("launcher", "from trivet import Launcher\nclass Bad(Launcher): ...", "does not define launch"),
    ],
)
def test_classes_that_are_no_plugins_of_their_kind(install: Install, kind: str, code: str, message: str) -> None:
    install("acme_bad", "odd = acme_bad:Bad", code, kind=kind)
    with pytest.raises(PluginInvalid, match=message):
        registry.load(kind, "odd")


def test_a_launcher_is_chosen_checked_against_the_world_and_planned(installed: None) -> None:
    assert resolve(accelerator="cpu").launcher is None
    assert resolve(accelerator="cpu", launcher="local").plan.launcher == "local"
    assert resolve(accelerator="cpu", devices=2).plan.launcher == "local"
    plan = resolve(accelerator="cpu", devices=2, num_nodes=2, launcher="here").plan
    assert (plan.launcher, plan.world_size) == ("here", 4)
    assert "processes    4 (2 on each of 2 nodes), started by here" in str(plan)
    with pytest.raises(PlanError, match=r"launcher 'local' \(trivet .*\): no environment says which node this is"):
        resolve(accelerator="cpu", devices=2, num_nodes=2)
    world = World(0, 2, 0, 2, 0, 1, "torchrun")
    with pytest.raises(
        PlanError, match=r"'here' .* and the environment \(torchrun\): it has started the processes"
    ) as told:
        resolve(accelerator="cpu", devices=2, launcher="here", world=world)
    assert told.value.conflicts[0].remedy == "--launcher auto"


class Net(scalar.Scalar):
    """Its launched fit runs in a worker, also on one process."""


def test_fit_goes_through_the_named_launcher(
    installed: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = Net()
    before = [param.clone() for param in module.parameters()]
    made = trainer(
        launcher={"name": "here", "patience": 2.5}, devices=1, default_root_dir=tmp_path, enable_progress_bar=False
    )
    made.fit(module, torch.utils.data.DataLoader(scalar.Numbers(4), batch_size=2))
    assert "launched with 2.5 1" in capsys.readouterr().out
    assert made.progress.update == 2
    assert any(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
