"""The CSV logger: what is in the file, and that no run touches another's."""

from __future__ import annotations

import csv
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from scalar import Scalar, loader, trainer
from trivet.errors import TrivetError
from trivet.loggers.csv import CSVLogger


class Logs(Scalar):
    def __init__(self, kind: str = "one") -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)


class Made(list[CSVLogger]):
    """Makes loggers; those that are still open are closed with the test."""

    def __call__(self, *args: Any, **options: Any) -> CSVLogger:
        self.append(CSVLogger(*args, **options))
        return self[-1]


@pytest.fixture
def make() -> Iterator[Made]:
    made = Made()
    yield made
    for logger in made:
        logger.finalize("success")


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_appended_and_visible_at_once(make: Made, tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.log_metrics({"loss": 0.5, "epoch": 0.0}, step=50)
    logger.log_metrics({"loss": 0.25, "epoch": 1.0}, step=100)
    assert rows(logger) == [
        {"epoch": "0", "step": "50", "loss": "0.5"},
        {"epoch": "1", "step": "100", "loss": "0.25"},
    ]


def test_the_file_is_not_rewritten_per_row(make: Made, tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    inode = Path(logger.log_dir, "metrics.csv").stat().st_ino
    for step in range(2, 20):
        logger.log_metrics({"loss": 0.5}, step=step)
    assert Path(logger.log_dir, "metrics.csv").stat().st_ino == inode


def test_a_new_column_keeps_the_rows_before_it(make: Made, tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_metrics({"val/acc, top": 0.9, "epoch": 0}, step=2)
    logger.log_metrics({"loss": math.nan}, step=3)
    logger.finalize("success")
    assert rows(logger) == [
        {"epoch": "", "step": "1", "loss": "0.5", "val/acc, top": ""},
        {"epoch": "0", "step": "2", "loss": "", "val/acc, top": "0.9"},
        {"epoch": "", "step": "3", "loss": "nan", "val/acc, top": ""},
    ]
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["metrics.csv"]


def test_nothing_is_created_before_the_first_use(make: Made, tmp_path: Path) -> None:
    logger = make(tmp_path / "runs", name="net")
    assert not (tmp_path / "runs").exists()
    assert logger.log_dir == str(tmp_path / "runs" / "net" / "version_0")
    assert Path(logger.log_dir).is_dir()


def test_every_run_gets_a_version_of_its_own(make: Made, tmp_path: Path) -> None:
    (tmp_path / "version_7").mkdir()
    (tmp_path / "version_best").mkdir()
    versions = [make(tmp_path).version for _ in range(2)]
    assert versions == [8, 9]


def test_a_version_that_is_given_is_continued(make: Made, tmp_path: Path) -> None:
    first = make(tmp_path, version="mine")
    first.log_metrics({"loss": 0.5}, step=1)
    first.log_hyperparams({"lr": 0.1})
    first.finalize("failed")
    path = Path(first.log_dir, "metrics.csv")
    path.write_bytes(path.read_bytes() + b",2,0.")  # a row that a crash tore
    second = make(tmp_path, version="mine")
    second.log_metrics({"acc": 1.0, "loss": 0.25}, step=3)
    second.log_hyperparams({"width": 8})
    assert [row["step"] for row in rows(second)] == ["1", "2", "3"]
    assert rows(second)[2]["loss"] == "0.25"
    assert yaml.safe_load(Path(second.log_dir, "hparams.yaml").read_text()) == {"lr": 0.1, "width": 8}


def test_an_open_logger_travels_to_another_process(make: Made, tmp_path: Path) -> None:
    logger = make(tmp_path)
    logger.log_metrics({"loss": 0.5}, step=1)
    copy = pickle.loads(pickle.dumps(logger))
    make.append(copy)
    copy.log_metrics({"loss": 0.25}, step=2)
    assert copy.version == 0
    assert [row["loss"] for row in rows(logger)] == ["0.5", "0.25"]


def test_a_logger_can_be_used_again_after_its_end(make: Made, tmp_path: Path) -> None:
    logger = make(tmp_path)
    for step in (1, 2):
        logger.log_metrics({"loss": 0.5}, step=step)
        logger.finalize("success")
    assert len(rows(logger)) == 2


@pytest.mark.parametrize(
    ("value", "written"),
    [((1, 2), [1, 2]), ({"a": {1: None}}, {"a": {"1": None}}), (math, repr(math)), ("ä: b", "ä: b")],
)
def test_hyperparameters_of_any_kind_are_written(make: Made, tmp_path: Path, value: object, written: object) -> None:
    logger = make(tmp_path)
    logger.log_hyperparams({"value": value})
    assert yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()) == {"value": written}


@pytest.mark.parametrize("name", ["metrics.csv", f".hparams.yaml.{os.getpid()}"])
def test_a_full_disk_is_told_with_path_and_reason(name: str, make: Made, tmp_path: Path) -> None:
    """At the first file that a run opens, and at the one beside it."""
    logger = make(tmp_path, version=0)
    Path(logger.log_dir).mkdir()
    Path(logger.log_dir, name).symlink_to("/dev/full")
    message = rf"CSVLogger cannot write in '{logger.log_dir}': OSError: .*No space left.* Trainer\(logger=False\)"
    with pytest.raises(TrivetError, match=message):
        trainer(logger=logger, max_steps=2, log_every_n_steps=1).fit(Logs(), loader(4))


def test_a_directory_that_cannot_be_made_is_told_with_path_and_reason(make: Made, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrivetError, match=rf"CSVLogger cannot write in '{tmp_path}/file.*Not a directory"):
        trainer(logger=make(tmp_path / "file" / "runs"), max_steps=2).fit(Logs(), loader(4))


def test_a_row_after_the_checkpoint_of_the_same_update_is_there_once(make: Made, tmp_path: Path) -> None:
    """A kill after an epoch's row, which the run that goes on from the epoch's last update logs again."""
    killed, again = make(tmp_path, version=0), make(tmp_path, version=0)
    killed.log_metrics({"loss": 0.1, "epoch": 0}, step=4)
    killed.log_metrics({"mean": 0.3, "epoch": 0}, step=4)
    killed.log_metrics({"loss": 0.2, "epoch": 1}, step=5)
    killed.finalize("failed")
    again.go_on(0, 4)
    again.log_metrics({"mean": 0.3, "epoch": 0}, step=4)
    again.log_metrics({"loss": 0.2, "epoch": 1}, step=5)
    again.log_metrics({"loss": 0.2, "epoch": 1}, step=5)  # such a row may come twice where nothing was cut short
    assert [(row["step"], row["loss"], row["mean"]) for row in rows(again)] == [
        ("4", "0.1", ""), ("4", "", "0.3"), ("5", "0.2", ""), ("5", "0.2", ""),
    ]  # fmt: skip
