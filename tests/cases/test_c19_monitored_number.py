"""C19: the monitored number that is stored with a checkpoint was computed from exactly its weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import scalar
from torch.utils.data import DataLoader
from trivet.callbacks.checkpoint import Checkpoint
from trivet.callbacks.model_checkpoint import ModelCheckpoint
from trivet.checkpoint import directory

BATCHES = 6
# w goes up and down, so that neither the newest nor the oldest is the best
STEPS = [3.0, -1.0, -2.0, 4.0, -5.0, 2.0]


class W(scalar.Scalar):
    """Validation logs w, under the name of the loader where there are several."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.w.detach() + batch.mean() * 0)

    def on_validation_epoch_end(self):
        self.log("own", self.w.detach())


def fit(callback, loaders=1, epochs=2, ckpt_path=None, **options):
    options.setdefault("enable_checkpointing", None)
    trainer = scalar.trainer(max_epochs=epochs, callbacks=[callback], **options)
    val = [DataLoader(scalar.Numbers(2)) for _ in range(loaders)]
    module = W()
    trainer.fit(module, scalar.loader(STEPS), val if loaders > 1 else val[0], ckpt_path=ckpt_path)
    return trainer


def stored(place):
    """By checkpoint: its weights, its update and what the manifest holds."""
    paths = [path for path in place.iterdir() if path.is_dir()]
    values = {str(path): directory.manifest(path) for path in paths}
    return {
        path: (directory.read_weights(path)["w"].item(), m["progress"]["update"], m["metrics"])
        for path, m in values.items()
    }


KINDS = {
    "save and validate every 2 updates": ({"every_n_updates": 2}, {"val_check_interval": "2 updates"}),
    "saves between validations": ({"every_n_updates": 1}, {"val_check_interval": "3 updates"}),
    "validations between saves": ({"every_n_updates": 3}, {"val_check_interval": "1 updates"}),
    "never together": ({"every_n_updates": 5}, {"val_check_interval": "4 updates"}),
    "in the middle of the epoch": ({"every_n_epochs": 1}, {"val_check_interval": 0.5}),
    "at the middle and the end": ({"every": "0.5 epochs"}, {"val_check_interval": 0.5}),
    "only at the end": ({}, {}),
    "every second epoch": ({}, {"check_val_every_n_epoch": 2, "epochs": 4}),
    "a validation before training": ({"every_n_updates": 1}, {"num_sanity_val_steps": 1}),
    "accumulated": ({"every_n_updates": 1}, {"accumulate_grad_batches": 2, "val_check_interval": 2}),
    "several loaders": ({"every_n_updates": 1}, {"val_check_interval": "2 updates", "loaders": 2}),
}


def check(place, callback, monitor, top_k):
    found = stored(place)
    assert found
    for weights, update, metrics in found.values():
        for name in ("own", "val", monitor):
            assert metrics.get(name, weights) == weights, (update, name)
    ranked = {path: metrics[monitor] for path, (_, _, metrics) in found.items() if monitor in metrics}
    assert all(path in ranked and ranked[path] == score for path, score in callback.best_k_models.items())
    if top_k == -1:
        assert callback.best_k_models == ranked
    if ranked:
        best = (min if callback.mode == "min" else max)(ranked.values())
        assert callback.best_model_score == ranked[callback.best_model_path] == best
        assert found[callback.best_model_path][0] == best  # in the weights themselves
    for path in found:  # the number in the name
        number = float(Path(path).name.partition("own=")[2].partition("-v")[0])
        assert math.isnan(number) if path not in ranked else number == ranked[path]
    return found


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_is_of_these_weights(tmp_path, kind, save_async):
    saves, runs = KINDS[kind]
    for mode, top_k in (("min", -1), ("max", 2)):
        place = tmp_path / mode
        monitor = "val/dataloader_idx_1" if runs.get("loaders") else "own"
        callback = Checkpoint(
            place, monitor=monitor, mode=mode, save_top_k=top_k, save_async=save_async,
            filename=f"{{update}}-own={{{monitor}:.1f}}", **saves,
        )  # fmt: skip
        fit(callback, **runs)
        found = check(place, callback, monitor, top_k)
        if top_k == -1:
            everything = {update: w for w, update, _ in found.values()}
        else:
            # what is kept is the best of all that was ever saved with a number
            scored = {u for _, u, m in stored(tmp_path / "min").values() if monitor in m}
            best = sorted((everything[u] for u in scored), reverse=True)[:top_k]
            assert sorted(callback.best_k_models.values(), reverse=True) == best


def test_a_save_that_falls_on_a_due_validation_waits_for_it(tmp_path):
    callback = Checkpoint(tmp_path, monitor="own", every_n_updates=2, save_top_k=-1, filename="{update}-own={own:.1f}")
    fit(callback, val_check_interval="2 updates")
    found = check(tmp_path, callback, "own", -1)
    assert {update for _, update, metrics in found.values() if "own" in metrics} == {2, 4, 6, 8, 10, 12}


@pytest.mark.parametrize("save_async", [False, True])
def test_of_a_resumed_run_too(tmp_path, save_async):
    options = {
        "monitor": "own", "mode": "max", "save_top_k": 2, "every_n_updates": 2, "save_async": save_async,
        "filename": "{update}-own={own:.1f}",
    }  # fmt: skip
    whole = Checkpoint(tmp_path / "whole", **options)
    fit(whole, val_check_interval="2 updates", epochs=3)
    first = Checkpoint(tmp_path / "parts", **options)
    fit(first, val_check_interval="2 updates", epochs=1)
    second = Checkpoint(tmp_path / "parts", **options)
    fit(second, val_check_interval="2 updates", epochs=3, ckpt_path=first.last_model_path)
    check(tmp_path / "parts", second, "own", 2)
    assert sorted(second.best_k_models.values()) == sorted(whole.best_k_models.values())


@pytest.mark.parametrize("options", [{}, {"every_n_train_steps": 2}, {"save_on_train_epoch_end": False}])
def test_of_lightnings_callback_too(tmp_path, options):
    callback = ModelCheckpoint(
        tmp_path, monitor="own", save_top_k=-1, filename="{step}-{own:.1f}", **options
    )  # fmt: skip
    fit(callback, val_check_interval=0.5)
    check(tmp_path, callback, "own", -1)
