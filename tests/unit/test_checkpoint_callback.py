from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory
from trivet.errors import CheckpointError, ConfigurationError, RankFailed
from trivet.state import Progress, TrainState


class FakeTrainer:
    """One process whose weights are the number of updates; validation logs them as ``val/w``."""

    global_rank, world_size, is_global_zero, log_every_n_steps, num_training_batches = 0, 1, True, 50, 5
    resumed_from: str | None = None

    def __init__(self, root: Path, callback: Checkpoint) -> None:
        self.log_dir, self.callback = root, callback
        self.progress = Progress()
        self.callback_metrics: dict[str, float] = {}
        self.validation_due = self.sanity_checking = False
        self.at_boundary = True
        self.saves: list[str] = []
        self.fails = False
        self.metric = lambda update: float(update)

    def agree(self, flag: bool) -> bool:
        return flag

    def stored(self, where: Path) -> Path:
        return where

    def save_checkpoint(self, path: str, metrics: dict[str, float] | None = None) -> None:
        if self.fails:
            raise CheckpointError(f"cannot write checkpoint {path!r}: no space")
        state = TrainState(
            module={"w": torch.tensor(float(self.progress.update))},
            progress=self.progress.to_dict(),
            callbacks={self.callback.state_key: self.callback.state_dict()},
        )
        directory.write(path, state, rank=0, world_size=1, metrics=metrics)
        self.saves.append(Path(path).name)

    # the loop's order of hooks
    def start(self) -> FakeTrainer:
        self.callback.on_train_start(self, None)
        return self

    def update(self, validate: bool = False, applied: bool = True) -> None:
        self.progress.update += applied
        self.progress.skipped += not applied
        self.callback_metrics["train/loss"] = 1.0
        self.validation_due = validate
        self.callback.on_update_end(self, None)
        if validate:
            self.validate()

    def validate(self) -> None:
        self.validation_due = False
        self.callback.on_validation_start(self, None)
        self.callback_metrics["val/w"] = self.metric(self.progress.update)
        self.callback.on_validation_end(self, None)

    def end_epoch(self, validate: bool = False) -> None:
        if validate:
            self.validate()
        self.progress.epoch += 1
        self.callback.on_train_epoch_end(self, None)

    def end(self) -> None:
        self.callback.on_train_end(self, None)


def run(tmp_path: Path, **options: Any) -> FakeTrainer:
    options.setdefault("dirpath", tmp_path / "c")
    options.setdefault("filename", "u{update}")
    return FakeTrainer(tmp_path, Checkpoint(**options)).start()  # type: ignore[arg-type]


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "c").iterdir())


def weights(path: str | Path) -> float:
    return directory.read_weights(path)["w"].item()


def test_by_default_every_epoch_and_the_newest_stays(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path, Checkpoint()).start()
    for _ in range(3):
        trainer.update()
        trainer.update()
        trainer.end_epoch()
    trainer.end()
    assert trainer.saves == ["epoch=1-update=2", "epoch=2-update=4", "epoch=3-update=6"]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["epoch=3-update=6"]
    callback = trainer.callback
    assert callback.best_model_path == callback.last_model_path == str(tmp_path / "checkpoints/epoch=3-update=6")


@pytest.mark.parametrize(("top_k", "left"), [(-1, ["u1", "u2", "u3"]), (2, ["u2", "u3"]), (0, [])])
def test_without_monitor_the_newest_are_kept(tmp_path: Path, top_k: int, left: list[str]) -> None:
    trainer = run(tmp_path, every_n_updates=1, save_top_k=top_k)
    for _ in range(3):
        trainer.update()
    assert (names(tmp_path) if left else trainer.saves) == left


def test_the_checkpoint_that_a_run_went_on_from_stays(tmp_path: Path) -> None:
    trainer = run(tmp_path, every_n_updates=1)
    trainer.update()
    trainer.resumed_from = str(tmp_path / "c" / "u1")
    trainer.update()
    trainer.update()
    assert names(tmp_path) == ["u1", "u3"]


def test_the_monitored_number_belongs_to_these_weights(tmp_path: Path) -> None:
    trainer = run(
        tmp_path, every_n_updates=2, monitor="val/w", mode="max", save_top_k=-1, filename="{update}-{val/w:.1f}"
    )
    for update in range(1, 9):
        trainer.update(validate=update % 4 == 0)
    trainer.end()
    assert names(tmp_path) == ["2-nan", "4-4.0", "6-nan", "8-8.0"]
    for path in (tmp_path / "c").iterdir():
        metrics = directory.manifest(path)["metrics"]
        assert metrics["train/loss"] == 1
        assert metrics.get("val/w", weights(path)) == weights(path)
        assert ("val/w" in metrics) == (weights(path) % 4 == 0)
    assert {Path(p).name: s for p, s in trainer.callback.best_k_models.items()} == {"4-4.0": 4, "8-8.0": 8}
    assert Path(trainer.callback.best_model_path).name == "8-8.0"
    assert trainer.callback.best_model_score == trainer.callback.current_score == 8


@pytest.mark.parametrize(("mode", "left", "best"), [("min", ["u2", "u4"], "u4"), ("max", ["u1", "u3"], "u3")])
def test_the_best_are_kept(tmp_path: Path, mode: str, left: list[str], best: str) -> None:
    scores = dict(enumerate([5.0, 2.0, 7.0, 1.0, float("nan"), 2.0, 5.0], start=1))
    trainer = run(tmp_path, every_n_updates=1, monitor="val/w", mode=mode, save_top_k=2)
    trainer.metric = scores.__getitem__
    for _ in scores:
        trainer.update(validate=True)
        assert Path(trainer.callback.best_model_path).is_dir()
    trainer.end()
    assert names(tmp_path) == left
    assert Path(trainer.callback.best_model_path).name == best


def test_a_run_that_saved_nothing_says_so(tmp_path: Path) -> None:
    trainer = run(tmp_path, every_n_updates=1, monitor="val/w")
    trainer.metric = lambda update: float("nan")
    trainer.update(validate=True)
    with pytest.warns(UserWarning, match="no checkpoint was saved: 'val/w' was never more than NaN"):
        trainer.end()


def test_a_checkpoint_without_rank_is_kept_until_the_next(tmp_path: Path) -> None:
    trainer = run(tmp_path, every_n_updates=1, monitor="val/w", save_top_k=1)
    kept = []
    for update in range(1, 6):
        trainer.update(validate=update % 3 == 0)
        kept.append(names(tmp_path))
    assert kept == [["u1"], ["u2"], ["u3"], ["u3", "u4"], ["u3", "u5"]]


def test_save_last_keeps_and_names_the_newest(tmp_path: Path) -> None:
    trainer = run(tmp_path, every_n_updates=1, monitor="val/w", save_last=True)
    for update in range(1, 4):
        trainer.update(validate=True)
        assert json.loads((tmp_path / "c/last.json").read_text()) == {"path": f"u{update}"}
        assert Path(trainer.callback.last_model_path).name == f"u{update}"
    assert names(tmp_path) == ["last.json", "u1", "u3"]
    none = run(tmp_path / "none", dirpath=tmp_path / "c2", every_n_updates=1, save_top_k=0, save_last=True)
    none.update()
    none.update()
    assert sorted(p.name for p in (tmp_path / "c2").iterdir()) == ["last.json", "u2"]


def test_intervals_combine_and_save_once_per_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("trivet.callbacks.due.time.monotonic", lambda: now[0])
    trainer = run(tmp_path, every_n_updates=3, every_n_epochs=1, every_n_minutes=1, save_top_k=-1)
    trainer.update()
    now[0] = 61
    trainer.update()
    trainer.update()
    trainer.end_epoch()
    trainer.update(applied=False)
    trainer.update()
    trainer.end_epoch()
    trainer.update()
    trainer.end()
    trainer.end()
    assert trainer.saves == ["u2", "u3", "u4", "u5"]


def test_nothing_at_the_end_when_not_wanted(tmp_path: Path) -> None:
    trainer = run(tmp_path, every_n_epochs=0, save_on_train_end=False)
    trainer.update()
    trainer.end_epoch()
    trainer.end()
    assert trainer.saves == []


def test_names_never_meet_and_are_safe(tmp_path: Path) -> None:
    trainer = run(tmp_path, every_n_updates=1, save_top_k=-1, filename="../x{val/w}/best")
    trainer.update()
    trainer.update()
    assert names(tmp_path) == ["_xnan_best", "_xnan_best-v1"]
    name = Checkpoint(filename="{epoch:02d}-{step}-val/loss={val/loss:.3f}").format_name(1, 20, {"val/loss": 0.5})
    assert name == "01-20-val_loss=0.500"
    with pytest.raises(ConfigurationError, match=r"filename='\{epoch:q\}'"):
        Checkpoint(filename="{epoch:q}").format_name(1, 1, {})


def test_a_failed_save_leaves_the_books_on_the_old_checkpoint(tmp_path: Path) -> None:
    for policy in ("raise", "warn"):
        trainer = run(
            tmp_path / policy, dirpath=tmp_path / policy / "c", every_n_updates=1, monitor="val/w", mode="max",
            save_last=True, on_save_error=policy,
        )  # fmt: skip
        trainer.update(validate=True)
        before = trainer.callback.state_dict()
        trainer.fails = True
        if policy == "raise":
            with pytest.raises(CheckpointError, match="no space"):
                trainer.update(validate=True)
        else:
            with pytest.warns(UserWarning, match="goes on without this checkpoint: .*no space"):
                trainer.update(validate=True)
        assert trainer.callback.state_dict() == before
        assert Path(trainer.callback.best_model_path).name == "u1"
        assert names(tmp_path / policy) == ["last.json", "u1"]
        assert json.loads((tmp_path / policy / "c/last.json").read_text()) == {"path": "u1"}
        trainer.fails = False
        trainer.update(validate=True)
        assert names(tmp_path / policy) == ["last.json", "u3"]


def test_a_missing_monitor_names_the_nearest(tmp_path: Path) -> None:
    trainer = run(tmp_path, monitor="val_w")
    trainer.update()
    with pytest.raises(ConfigurationError, match=r"monitor='val_w'.* Did you mean 'val/w'\? Logged: train/loss, val/w"):
        trainer.end_epoch(validate=True)
    trainer = run(tmp_path, monitor="val_w")
    trainer.update()
    trainer.end_epoch()
    with pytest.warns(UserWarning, match="no checkpoint was ranked: 'val_w'"):
        trainer.end()


def test_the_sanity_check_saves_nothing(tmp_path: Path) -> None:
    callback = Checkpoint(tmp_path / "c", every_n_updates=1)
    trainer = FakeTrainer(tmp_path, callback)
    trainer.sanity_checking = True
    trainer.validate()
    trainer.sanity_checking = False
    trainer.start().end()
    assert trainer.saves == ["epoch=0-update=0"]


def test_resumed_books_go_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_updates": 1, "monitor": "val/w", "mode": "max", "save_top_k": 2}
    first = run(tmp_path, **options)
    for _ in range(3):
        first.update(validate=True)
    state = directory.read(tmp_path / "c/u3").callbacks
    second = FakeTrainer(tmp_path, Checkpoint(tmp_path / "c", filename="u{update}", **options))
    second.progress = Progress(update=3)
    second.callback.load_state_dict(state[second.callback.state_key])
    assert second.callback.best_model_path == first.callback.best_model_path
    second.start()
    second.end()
    assert second.saves == []
    second.start()
    second.update(validate=True)
    assert names(tmp_path) == ["u3", "u4"]
    elsewhere = FakeTrainer(tmp_path, Checkpoint(tmp_path / "d", filename="u{update}", **options))
    elsewhere.callback.load_state_dict(second.callback.state_dict())
    elsewhere.start()
    assert elsewhere.callback.best_k_models == {}
    assert names(tmp_path) == ["u3", "u4"]


def test_paths_from_a_hostile_state_are_never_deleted(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "c/plain").mkdir(parents=True)
    callback = Checkpoint(tmp_path / "c", every_n_updates=1)
    state = callback.state_dict()
    state.update(dirpath=str(tmp_path / "c"), unranked=[str(victim), str(tmp_path / "c/plain"), str(tmp_path / "c/..")])
    callback.load_state_dict(state)
    trainer = FakeTrainer(tmp_path, callback).start()
    trainer.update()
    trainer.update()
    assert victim.is_dir()
    assert (tmp_path / "c/plain").is_dir()


def test_a_directory_that_cannot_be_written_is_found_out_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = f"cannot write checkpoints into '{tmp_path}/file/c': NotADirectoryError"
    with pytest.raises(CheckpointError, match=text):
        run(tmp_path, dirpath=tmp_path / "file/c")
    with pytest.warns(UserWarning, match=text):
        run(tmp_path, dirpath=tmp_path / "file/c", on_save_error="warn")
    run(tmp_path, dirpath=tmp_path / "not/yet/there")
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("every", "saves"),
    [
        ("2 updates", ["u2", "u4", "u6"]),
        ("1 epoch", ["u5"]),
        ("0.5 epochs", ["u3", "u5"]),
        ("1.5 epochs", []),
        ("90 s", ["u2", "u4", "u6"]),
        ({"minutes": 2}, ["u2", "u4", "u6"]),
    ],
)
def test_one_interval_with_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any, saves: list[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("trivet.callbacks.due.time.monotonic", lambda: now[0])
    trainer = run(tmp_path, every=every, save_on_train_end=False)
    for update in range(1, 7):
        now[0] += 60
        trainer.progress.batch += 1
        trainer.update()
        if update == 5:
            trainer.progress.earlier, trainer.progress.batch = 5, 0
            trainer.end_epoch()
    assert trainer.saves == saves


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"every": "10 bananas"},
            r"Checkpoint\.every='10 bananas': allowed are .*'100 updates'.*'0\.5 epochs'.*'10 min",
        ),
        ({"every": 10}, "Checkpoint.every=10: allowed are"),
        ({"every": "10 min", "every_n_epochs": 1}, "every_n_epochs=1.: give one of them"),
    ],
)
def test_wrong_intervals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Checkpoint(**options)


def test_start_sweeps_dead_saves(tmp_path: Path) -> None:
    (tmp_path / "c/.u1.tmp-0123456789ab").mkdir(parents=True)
    run(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("exception", "world_size", "at_boundary", "saved"),
    [
        (KeyboardInterrupt(), 1, True, True),
        (ValueError(), 1, True, True),
        (ValueError(), 1, False, False),
        (ValueError(), 2, True, False),
        (RankFailed(1, "ValueError", "x"), 2, True, False),
        (CheckpointError("x"), 1, True, False),
    ],
)
def test_save_on_exception(
    tmp_path: Path, exception: BaseException, world_size: int, at_boundary: bool, saved: bool
) -> None:
    trainer = run(tmp_path, save_on_exception=True, save_last=True)
    trainer.update()
    trainer.at_boundary, trainer.world_size = at_boundary, world_size
    trainer.callback.on_exception(trainer, None, exception)  # type: ignore[arg-type]
    assert trainer.saves == (["exception-u1"] if saved else [])
    if saved:
        assert json.loads((tmp_path / "c/last.json").read_text()) == {"path": "exception-u1"}
        assert Path(trainer.callback.last_model_path).name == "exception-u1"


def test_a_failed_save_on_exception_only_warns(tmp_path: Path) -> None:
    trainer = run(tmp_path, save_on_exception=True)
    trainer.update()
    trainer.fails = True
    with pytest.warns(UserWarning, match="no checkpoint was saved on KeyboardInterrupt"):
        trainer.callback.on_exception(trainer, None, KeyboardInterrupt())  # type: ignore[arg-type]
    assert trainer.callback.last_model_path == ""
    with warnings.catch_warnings():
        Checkpoint().on_exception(trainer, None, KeyboardInterrupt())  # type: ignore[arg-type]  # it never started


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "best"}, "mode='best'"),
        ({"on_save_error": "ignore"}, "on_save_error='ignore'"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"every_n_updates": -1}, "every_n_updates=-1"),
        ({"every_n_epochs": 0.5}, "every_n_epochs=0.5"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Checkpoint(**options)


def test_two_callbacks_differ_in_their_keys() -> None:
    keys = {Checkpoint().state_key, Checkpoint(monitor="a").state_key, Checkpoint(every_n_updates=2).state_key}
    assert len(keys) == 3
