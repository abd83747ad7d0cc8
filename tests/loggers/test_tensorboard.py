"""TensorBoardLogger, read back with TensorBoard's own reader; and what all loggers share."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
import yaml  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, TensorDataset
from trivet import loggers
from trivet.errors import ConfigurationError
from trivet.loggers import CSVLogger, Logger

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's and protobuf's own


def made(*args: Any, **options: Any) -> Any:
    return loggers.TensorBoardLogger(*args, **options)


def events(logger: Any) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger.finalize("success")
    found = EventAccumulator(logger.log_dir)
    found.Reload()
    return found


def test_metrics(tmp_path: Path) -> None:
    logger = made(tmp_path, "exp", prefix="a")
    logger.log_metrics({"loss": 0.5, "epoch": 0.0}, step=10)
    logger.log_metrics({"loss": 0.25, "epoch": 1.0}, step=20)
    assert Path(logger.log_dir) == tmp_path / "exp" / "version_0"
    assert [(e.step, e.value) for e in events(logger).Scalars("a-loss")] == [(10, 0.5), (20, 0.25)]


def test_directories(tmp_path: Path) -> None:
    assert Path(made(tmp_path, version="mine", sub_dir="tb").log_dir) == tmp_path / "mine" / "tb"
    first, second = made(tmp_path, None), made(tmp_path, None)
    assert (first.version, second.version) == (0, 1)
    assert (first.save_dir, first.root_dir, first.name) == (str(tmp_path), str(tmp_path), "")


@pytest.mark.parametrize("default", [True, False])
def test_hyperparameters(tmp_path: Path, default: bool) -> None:
    logger = made(tmp_path, default_hp_metric=default)
    logger.log_hyperparams({"lr": 0.1, "layer": torch.nn.ReLU, "name": "x"})
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())["lr"] == 0.1
    found = events(logger)
    assert ("hp_metric" in found.Tags()["scalars"]) is default
    assert any("hparams" in tag for tag in found.PluginAssets("hparams") or found.summary_metadata) is default


def test_a_graph(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    logger = made(tmp_path, log_graph=True)
    logger.log_graph(net, torch.ones(1, 2))
    assert events(logger).Tags()["graph"]
    with pytest.warns(UserWarning, match="no example_input_array"):
        logger.log_graph(net)
    silent = made(tmp_path)
    silent.log_graph(net, torch.ones(1, 2))
    assert not events(silent).Tags()["graph"]


def test_the_experiment_on_other_ranks_ignores_all(tmp_path: Path) -> None:
    logger = made(tmp_path)
    logger.rank = 1
    logger.experiment.add_image("x", torch.ones(3, 2, 2), 0)
    logger.experiment.config["a"] = 1
    assert logger.experiment.anything.at(1)[2] is logger.experiment
    assert not list(tmp_path.iterdir())
    with pytest.raises(AttributeError):
        logger.experiment.__iter__  # noqa: B018
    logger.rank = 0
    logger.experiment.add_text("x", "hello")
    assert events(logger).Tags()["tensors"] == ["x/text_summary"]


def test_it_travels_to_workers(tmp_path: Path) -> None:
    logger = made(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.log_dir == logger.log_dir
    logger.finalize("success")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else real(name))
    with pytest.raises(ConfigurationError, match=r"pip install 'trivet\[tensorboard\]'"):
        made(tmp_path)


def test_making_one_imports_nothing_of_it(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from trivet.loggers import TensorBoardLogger; "
        f"TensorBoardLogger({str(tmp_path)!r}); print('tensorboard' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["tensorboard", "TensorBoardLogger"])
def test_in_a_run_by_name(tmp_path: Path, name: str) -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 2)), 2)
    trainer = trivet.Trainer(
        accelerator="cpu", max_epochs=1, logger=name, default_root_dir=tmp_path, log_every_n_steps=2,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), data)
    assert [e.step for e in events(trainer.loggers[0]).Scalars("loss")] == [2, 4]


def test_exported_names() -> None:
    for name in loggers.__all__:
        assert issubclass(getattr(loggers, name), Logger)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        loggers.Nothing  # noqa: B018


def test_csv_has_lightnings_arguments(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, None, prefix="run", flush_logs_every_n_steps=1)
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=1)
    logger.finalize("success")
    assert (Path(logger.log_dir) / "metrics.csv").read_text().splitlines() == ["epoch,step,run-loss", "0,1,0.5"]
    assert logger.experiment is logger
    logger.log_graph(None)
    with pytest.raises(ConfigurationError, match="flush_logs_every_n_steps=0"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=0)
