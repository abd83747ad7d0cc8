"""EarlyStopping: when it ends training, what it remembers, and that ranks agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from callback_runs import Net, loader, trainer
from ranks import on_two_ranks
from trivet.callbacks import Checkpoint, EarlyStopping
from trivet.callbacks.early_stopping import EarlyStoppingReason
from trivet.errors import ConfigurationError

NAN = float("nan")


def run(
    root: Path, script: list[float], flags: dict[str, Any] | None = None, ckpt_path: str | None = None, **options: Any
) -> tuple[EarlyStopping, Any]:
    stopping = EarlyStopping("val_loss", **options)
    made = trainer(root, stopping, Checkpoint(root / "ck", save_top_k=-1), **{"max_epochs": 8, **(flags or {})})
    net = Net(script)
    if ckpt_path is not None:
        net.validations = int(ckpt_path.split("epoch=")[1].split("-")[0])
    made.fit(net, loader(), loader(8), ckpt_path=ckpt_path)
    return stopping, made


@pytest.mark.parametrize(
    ("script", "options", "epochs", "reason"),
    [
        ([3.0, 2.0, 2.5, 2.4, 2.3, 1.0, 1.0, 1.0], {}, 5, EarlyStoppingReason.PATIENCE_EXHAUSTED),
        ([3.0, 2.95, 2.9, 2.85, 1, 1, 1, 1], {"min_delta": 0.5}, 4, EarlyStoppingReason.PATIENCE_EXHAUSTED),
        ([1.0, 2.0, 3.0, 3.0, 3.0, 1, 1, 1], {"mode": "max", "patience": 2}, 5, EarlyStoppingReason.PATIENCE_EXHAUSTED),
        ([3.0, NAN, 1, 1, 1, 1, 1, 1], {}, 2, EarlyStoppingReason.NON_FINITE_METRIC),
        ([3.0, 0.4, 1, 1, 1, 1, 1, 1], {"stopping_threshold": 0.5}, 2, EarlyStoppingReason.STOPPING_THRESHOLD),
        ([3.0, 9.0, 1, 1, 1, 1, 1, 1], {"divergence_threshold": 8.0}, 2, EarlyStoppingReason.DIVERGENCE_THRESHOLD),
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], {}, 8, EarlyStoppingReason.NOT_STOPPED),
    ],
)
def test_when_training_ends(
    tmp_path: Path, script: list[float], options: dict[str, Any], epochs: int, reason: EarlyStoppingReason
) -> None:
    stopping, made = run(tmp_path, script, **options)
    assert made.current_epoch == epochs
    assert stopping.stopping_reason is reason
    assert stopping.stopped_epoch == (epochs - 1 if reason is not EarlyStoppingReason.NOT_STOPPED else 0)


def test_the_training_epochs_own_metric_is_the_newest(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss_epoch", min_delta=1e9, patience=1)  # the first value improves on infinity
    made = trainer(tmp_path, stopping)
    made.fit(Net(), loader())
    assert made.current_epoch == 2
    assert stopping.best_score == pytest.approx(made.callback_metrics["loss_epoch"], rel=2.0)


def test_after_each_of_several_validations(tmp_path: Path) -> None:
    stopping, made = run(tmp_path, [3.0, 2.0, 2.0, 2.0, 2.0], {"val_check_interval": 0.25})
    assert (made.current_epoch, made.global_step) == (1, 10)  # the fifth validation is the next epoch's first
    stopping, made = run(tmp_path, [3.0, 2.0, 2.0, 2.0], {"val_check_interval": 0.25}, patience=2)
    assert (made.current_epoch, made.global_step) == (1, 8)
    assert stopping.wait_count == 2


def test_min_epochs_is_kept(tmp_path: Path) -> None:
    _, made = run(tmp_path, [1.0] * 8, {"min_epochs": 6}, patience=1)
    assert made.current_epoch == 6


def test_resumed_it_goes_on_counting(tmp_path: Path) -> None:
    script = [3.0, 2.0, 2.1, 2.2, 2.3, 1.0, 1.0, 1.0]
    whole, made = run(tmp_path / "whole", script)
    run(tmp_path / "half", script, {"max_epochs": 3})
    path = str(next((tmp_path / "half" / "ck").glob("epoch=3-*")))
    half, again = run(tmp_path / "rest", script, ckpt_path=path)
    assert (half.state_dict(), again.current_epoch) == (whole.state_dict(), made.current_epoch)


def test_resumed_after_its_end_it_ends_at_once_unless_patience_grew(tmp_path: Path) -> None:
    script = [3.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    run(tmp_path / "first", script, patience=2)
    path = str(next((tmp_path / "first" / "ck").glob("epoch=3-*")))
    with pytest.warns(UserWarning, match=r"had ended this run already: .* a patience of more than 2"):
        _, same = run(tmp_path / "same", script, ckpt_path=path, patience=2)
    _, more = run(tmp_path / "more", script, ckpt_path=path, patience=4)
    assert (same.current_epoch, more.current_epoch) == (3, 5)


def test_one_that_never_looked_says_so(tmp_path: Path) -> None:
    made = trainer(tmp_path, EarlyStopping("val_loss"), max_steps=1)
    with pytest.warns(UserWarning, match=r"never looked at 'val_loss'"):
        made.fit(Net(), loader(), loader(8))


def test_a_metric_that_nobody_logs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'val_los'.*Did you mean 'val_loss'\?.*strict=False"):
        trainer(tmp_path, EarlyStopping("val_los")).fit(Net(), loader(), loader(8))
    made = trainer(tmp_path, EarlyStopping("val_los", strict=False))
    made.fit(Net(), loader(), loader(8))
    assert made.current_epoch == 4


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"mode='least'"):
        EarlyStopping("x", mode="least")
    with pytest.raises(ConfigurationError, match=r"patience=-1"):
        EarlyStopping("x", patience=-1)


def test_it_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, [3.0, 2.0, 2.0] + [9.0] * 5, verbose=True, patience=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "EarlyStopping: val_loss improved from inf to 3.",
        "EarlyStopping: val_loss improved from 3 to 2.",
        "EarlyStopping: val_loss did not improve in 1 checks; the best was 2.",
    ]


class Apart(Net):
    """Ranks log different values, not reduced: rank 0's gets worse, rank 1's better."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        sign = 1.0 if self.global_rank == 0 else -1.0
        self.log("mine", sign * self.current_epoch, on_step=True, on_epoch=False)
        return self.net(batch[0]).square().mean()


def stop_together(root: Path) -> Any:
    stopping = EarlyStopping("mine", patience=2)
    made = trainer(root, stopping, max_epochs=8, enable_checkpointing=False)
    made.fit(Apart(), loader())
    return made.current_epoch, stopping.state_dict()


def test_ranks_that_see_different_values_decide_alike(tmp_path: Path) -> None:
    first, second = on_two_ranks(stop_together, tmp_path)
    assert first == second
    assert first[0] == 3
