"""ModelCheckpoint: Lightning's arguments over Checkpoint."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trivet
from callback_runs import Net, loader, trainer
from trivet.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from trivet.checkpoint import directory
from trivet.errors import ConfigurationError


def run(root: Path, script: list[float] | None = None, flags: dict[str, Any] | None = None, **options: Any) -> Any:
    saver = ModelCheckpoint(root / "ck", **options)
    trainer(root, saver, **(flags or {})).fit(Net(script or []), loader(), loader(8))
    names = sorted(path.name for path in (root / "ck").iterdir() if path.is_dir()) if (root / "ck").is_dir() else []
    return saver, names


def test_names_as_in_lightning(tmp_path: Path) -> None:
    _, names = run(tmp_path / "a")
    assert names == ["epoch=4-step=32"]
    script = [0.5, 0.25, 0.75, 1.0]
    saver, names = run(tmp_path / "b", script, monitor="val_loss", filename="{epoch:02d}-{val_loss:.2f}", save_top_k=2)
    assert names == ["epoch=01-val_loss=0.50", "epoch=02-val_loss=0.25"]
    assert Path(saver.best_model_path).name == names[1]
    assert Path(saver.kth_best_model_path).name == names[0]
    assert (saver.best_model_score, saver.kth_value) == (0.25, 0.5)
    _, names = run(tmp_path / "c", filename="e{epoch}", auto_insert_metric_name=False)
    assert names == ["e4"]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 4),
        ({"every_n_epochs": 2}, 2),
        ({"every_n_epochs": 3}, 2),  # and the end of training
        ({"every_n_train_steps": 10}, 4),  # 10, 20, 30 and the end
        ({"train_time_interval": timedelta(hours=1)}, 1),
        ({"save_on_train_epoch_end": False}, 4),
    ],
)
def test_when_it_saves(tmp_path: Path, options: dict[str, Any], count: int) -> None:
    _, names = run(tmp_path, save_top_k=-1, **options)
    assert len(names) == count


def test_after_each_of_several_validations(tmp_path: Path) -> None:
    script = [9.0, 8.0, 1.0, 7.0, 6.0, 5.0, 4.0, 3.0]
    saver, names = run(tmp_path, script, {"max_epochs": 2, "val_check_interval": 0.25}, monitor="val_loss")
    assert names == ["epoch=0-step=6"]
    assert directory.manifest(saver.best_model_path)["metrics"]["val_loss"] == 1.0


def test_only_where_a_validation_was(tmp_path: Path) -> None:
    flags = {"check_val_every_n_epoch": 2}
    _, names = run(tmp_path, [2.0, 1.0], flags, monitor="val_loss", save_top_k=-1, filename="{val_loss}")
    assert names == ["val_loss=1.0", "val_loss=2.0"]


def test_one_name_that_is_replaced(tmp_path: Path) -> None:
    saver, names = run(tmp_path, filename="newest", enable_version_counter=False)
    assert names == ["newest"]
    assert directory.manifest(saver.last_model_path)["progress"]["epoch"] == 4


@pytest.mark.parametrize("mode", [True, "link"])
def test_the_last_is_named_in_a_file(tmp_path: Path, mode: Any) -> None:
    _, names = run(tmp_path, [1.0, 2.0, 3.0, 4.0], monitor="val_loss", save_last=mode)
    assert names == ["epoch=1-step=8", "epoch=4-step=32"]
    assert (tmp_path / "ck" / "last.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_weights_only": True}, r"read_weights"),
        ({"save_last": "copy"}, r"save_last='copy'"),
        ({"every_n_epochs": 1, "every_n_train_steps": 5}, r"give one of them"),
        ({"save_top_k": 3}, r"without a monitor"),
        ({"mode": "auto"}, r"mode='auto'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelCheckpoint(**options)


def test_it_is_the_trainers_checkpoint_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = ModelCheckpoint(tmp_path / "ck", verbose=True)
    made = trainer(tmp_path, saver, max_epochs=1)
    assert made.checkpoint_callback is saver
    made.fit(Net(), loader())
    assert "ModelCheckpoint: saved" in capsys.readouterr().out
    made = trainer(tmp_path, saver, max_epochs=2)
    made.fit(Net(), loader(), ckpt_path="last")
    assert made.current_epoch == 2


class Raises(trivet.Callback):
    def __init__(self, hook: str, error: type[BaseException]) -> None:
        def fail(trainer: Any, module: Any, *args: Any) -> None:
            if trainer.progress.update == 3:
                raise error("on purpose")

        setattr(self, hook, fail)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_checkpoint_on_exception(tmp_path: Path, error: type[BaseException]) -> None:
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    made = trainer(tmp_path, saver, Raises("on_update_end", error), enable_checkpointing=False)
    with pytest.raises(error):
        made.fit(Net(), loader())
    assert directory.manifest(saver.ckpt_path)["progress"]["update"] == 3
    made = trainer(tmp_path, enable_checkpointing=False)
    made.fit(Net(), loader(), ckpt_path=saver.ckpt_path)
    assert made.global_step == 32


def test_none_from_within_an_update(tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    made = trainer(tmp_path, saver, Raises("on_after_backward", ValueError), enable_checkpointing=False)
    with pytest.raises(ValueError, match="on purpose"), pytest.warns(UserWarning, match="within an update"):
        made.fit(Net(), loader())
    assert not Path(saver.ckpt_path).exists()
