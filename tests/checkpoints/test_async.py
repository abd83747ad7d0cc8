"""Saves behind the training: the state of the moment, one at a time, complete before anything points at them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import async_runs as runs
import pytest
import scalar
import torch
import trivet
from async_runs import BATCHES, Net
from ranks import outcomes, run
from torch import nn
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory, staging
from trivet.checkpoint.tensors import ALL
from trivet.errors import CheckpointError, ConfigurationError


def names(place: Path) -> list[str]:
    """Checkpoints, those that were begun, and the pointer."""
    return sorted(path.name for path in place.iterdir() if path.is_dir() or path.name == "last.json")


PLACES = [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero1", 2)]


@pytest.mark.parametrize(("strategy", "world_size"), PLACES)
def test_what_is_stored_is_the_state_at_the_call(tmp_path, strategy, world_size):
    staged = run(world_size, runs.save_both_ways, tmp_path, strategy)
    for update in range(1, BATCHES + 1, 2):
        runs.assert_same_checkpoints(tmp_path / f"sync-{update}", tmp_path / f"async-{update}")
    assert staged[0][0] > 10
    if strategy == "ddp":
        assert staged[1] == [0] * len(staged[1])  # rank 0 writes everything: the others copy nothing


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("fsdp", 2)])
def test_one_is_in_flight_and_the_pointers_wait_for_it(tmp_path, strategy, world_size):
    for log, seen, last in run(world_size, runs.one_in_flight, tmp_path, strategy):
        assert log == [1] * BATCHES
        # the newest is complete when the next is begun, at the latest
        assert all(name in (f"u{update - 1}" if update > 1 else "", f"u{update - 2}" if update > 2 else "")
                   for update, name in enumerate(seen, start=1)), seen  # fmt: skip
        assert last == f"u{BATCHES}"
    assert names(tmp_path) == ["last.json", f"u{BATCHES}"]
    assert json.loads((tmp_path / "last.json").read_text()) == {"path": f"u{BATCHES}"}


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_failure_surfaces_at_the_next_save(tmp_path, world_size, rank, policy):
    strategy = "single" if world_size == 1 else "ddp"
    found = run(world_size, runs.failing, tmp_path, strategy, 3, policy, rank)
    for number, (raised, warned, last, updates) in enumerate(found):
        text = raised if policy == "raise" else "".join(warned)
        if policy == "raise" or number == 0:
            assert f"cannot write checkpoint '{tmp_path}/u3'" in text
            assert "No space left on device" in text
        assert len(warned) == (policy == "warn" and number == 0)
        assert (last, updates) == (("u2", 4) if policy == "raise" else (f"u{BATCHES}", BATCHES))
    assert directory.complete(tmp_path / last)
    assert json.loads((tmp_path / "last.json").read_text()) == {"path": last}
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "u3").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failure_of_the_last_save_surfaces_at_the_end(tmp_path, world_size):
    found = run(world_size, runs.failing, tmp_path, "single" if world_size == 1 else "fsdp", 3, "raise", 0, 3)
    for raised, _, last, updates in found:
        assert f"cannot write checkpoint '{tmp_path}/u3'" in raised
        assert (last, updates) == ("u2", 3)


def test_a_failure_that_nobody_waited_for_is_raised_when_fit_ends(tmp_path):
    class Saves(scalar.Scalar):
        def on_update_end(self):
            self.trainer.save_checkpoint_async(tmp_path / str(self.trainer.progress.update))

    with runs.full_disk(2), pytest.raises(CheckpointError, match=f"cannot write checkpoint '{tmp_path}/2': .*No space"):
        scalar.trainer().fit(Saves(), scalar.loader([1.0, 1.0, 1.0]))
    assert names(tmp_path) == ["1", "3"]


def test_the_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path):
    class Looks(trivet.Callback):
        saves = True

        def on_update_end(self, trainer, module):
            seen.append((sorted(p.name for p in tmp_path.glob("u*")), Path(callback.best_model_path).name))
            if trainer.progress.update == 1:
                gate.set()
                callback._flying.pending.join()
                gate.clear()

        def on_train_end(self, trainer, module):
            pass

    seen: list = []
    callback = runs.checkpoint(tmp_path, every_n_updates=1, save_on_train_end=False)
    with runs.gated() as gate:
        # the callback waits for u2 where training ends
        threading.Timer(1.0, gate.set).start()
        runs.trainer("single", [callback, Looks()], max_steps=2).fit(Net(), runs.batches())
    assert seen == [([], ""), (["u1"], "u1")]
    assert names(tmp_path) == ["last.json", "u2"]


class Ends(trivet.Callback):
    """Ends training in the middle of the save of the third update."""

    saves = True

    def __init__(self, how, gate):
        self.how, self.gate = how, gate

    def on_update_end(self, trainer, module):
        if trainer.progress.update == 2:  # the third save begins at the next update
            self.gate.set()
        if trainer.progress.update == 3:
            threading.Timer(0.3, self.gate.set).start()
            if self.how is KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise self.how("by the test")


@pytest.mark.parametrize("how", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("on_exception", [False, True])
def test_what_ends_training_waits_for_the_save(tmp_path, how, on_exception):
    callback = runs.checkpoint(tmp_path, every_n_updates=3, save_on_exception=on_exception)
    with runs.gated() as gate, pytest.raises(how):
        runs.trainer("single", [callback, Ends(how, gate)]).fit(Net(), runs.batches())
    assert names(tmp_path) == ["last.json", "u3"]  # these weights are saved: not once more
    assert callback.last_model_path == str(tmp_path / "u3")
    assert directory.complete(tmp_path / "u3")


def test_a_failure_is_no_more_than_a_warning_where_an_exception_ends_training(tmp_path):
    class Raises(trivet.Callback):
        saves = True

        def on_update_end(self, trainer, module):
            if trainer.progress.update == 2:
                raise ValueError("by the test")

    callback = runs.checkpoint(tmp_path)
    with (
        runs.full_disk(2),
        pytest.raises(ValueError, match="by the test"),
        pytest.warns(UserWarning, match=f"could not be saved: cannot write checkpoint '{tmp_path}/u2'"),
    ):
        runs.trainer("single", [callback, Raises()]).fit(Net(), runs.batches())
    assert names(tmp_path) == ["last.json", "u1"]


KILLED = """
import os, signal, sys
import async_runs as runs
import trivet

class Kills(trivet.Callback):
    saves = True

    def on_update_end(self, trainer, module):
        if trainer.progress.update == 1:
            gate.set()
            callback._flying.pending.join()
            gate.clear()
        if trainer.progress.update == 2:
            os.kill(os.getpid(), signal.SIGKILL)

callback = runs.checkpoint(sys.argv[1])
with runs.gated() as gate:
    runs.trainer("single", [callback, Kills()]).fit(runs.Net(), runs.batches())
"""


def test_a_kill_inside_leaves_the_previous_one(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=env, check=False)
    assert killed.returncode == -signal.SIGKILL
    begun, *rest = names(tmp_path)
    assert begun.startswith(".u2.tmp-")
    assert rest == ["last.json", "u1"]
    callback = runs.checkpoint(tmp_path)
    runs.trainer("single", [callback], max_steps=3).fit(Net(), runs.batches(), ckpt_path=tmp_path / "u1")
    assert names(tmp_path) == ["last.json", "u1", "u3"]


def test_a_save_of_the_usual_kind_waits_for_the_one_in_flight(tmp_path):
    class Saves(scalar.Scalar):
        def on_update_end(self):
            pending = self.trainer.save_checkpoint_async(tmp_path / "behind")
            self.trainer.save_checkpoint(tmp_path / "before")
            assert pending.done

    log: list[int] = []
    with runs.slow(0.1, log):
        scalar.trainer(max_steps=1).fit(Saves(), scalar.loader([1.0]))
    assert log == [1, 1]


def test_two_callbacks_share_one_flight(tmp_path):
    log: list[int] = []
    callbacks = [runs.checkpoint(tmp_path, save_top_k=-1), runs.checkpoint(tmp_path, save_top_k=2, every_n_updates=3)]
    with runs.slow(0.02, log):
        runs.trainer("single", callbacks, max_steps=3).fit(Net(), runs.batches())
    assert log == [1] * 4
    assert names(tmp_path) == ["last.json", "u1", "u2", "u3", "u3-v1"]


def test_resuming_from_it_goes_on_bit_for_bit(tmp_path):
    whole = Net()
    torch.manual_seed(1)
    callback = runs.checkpoint(tmp_path / "a", every_n_updates=3, save_top_k=-1)
    runs.trainer("single", [callback]).fit(whole, runs.batches())
    torch.manual_seed(2)
    resumed = Net()
    callback = runs.checkpoint(tmp_path / "b", every_n_updates=3, save_top_k=-1)
    runs.trainer("single", [callback]).fit(resumed, runs.batches(), ckpt_path=tmp_path / "a/u3")
    runs.assert_same(whole.state_dict(), resumed.state_dict())
    a, b = directory.read(tmp_path / f"a/u{BATCHES}"), directory.read(tmp_path / f"b/u{BATCHES}")
    runs.assert_same(a.optimizers, b.optimizers)


def test_buffers_stay_and_tied_tensors_share_one():
    buffers, module = staging.Buffers(), nn.Linear(3, 2)
    state = {"a": module.weight.detach(), "b": module.bias.detach(), "tied": module.weight.detach()}
    first = buffers.stage({ALL: state})[ALL]
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    assert places["a"] == places["tied"] != module.weight.data_ptr()
    nn.init.ones_(module.weight)
    assert not first["a"].eq(1).all()
    second = buffers.stage({ALL: state})[ALL]
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert second["a"].eq(1).all()
    third = buffers.stage({ALL: {"a": torch.zeros(4), "b": state["b"].double()}})[ALL]
    assert third["a"].shape == (4,)
    assert third["b"].dtype == torch.float64
    assert set(buffers.of) == {"a", "b"}


def test_a_state_that_cannot_be_copied_is_a_failure_like_any_other(tmp_path):
    class Saves(scalar.Scalar):
        def on_update_end(self):
            pending = self.trainer.save_checkpoint_async(tmp_path / "one")
            with pytest.raises(CheckpointError, match=f"cannot write checkpoint '{tmp_path}/one': MemoryError"):
                pending.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.Buffers, "_copy", lambda *args: (_ for _ in ()).throw(MemoryError()))
        scalar.trainer(max_steps=1).fit(Saves(), scalar.loader([1.0]))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_strategys_own_is_refused(tmp_path):
    class Strategy:
        own_folder = "engine"

    class Trainer:
        strategy = Strategy()

    with pytest.raises(ConfigurationError, match="save_async=True"):
        Checkpoint(tmp_path, save_async=True).on_train_start(Trainer(), None)


def test_one_rank_that_fails_alone_takes_nobody_hostage(tmp_path):
    def fails(place):
        class Fails(Net):
            def training_step(self, batch, batch_idx):
                if self.trainer.progress.update == 2 and self.trainer.global_rank == 1:
                    raise ValueError("on rank 1")
                return super().training_step(batch, batch_idx)

        with runs.slow(0.3, []):
            runs.trainer("ddp", [runs.checkpoint(place)]).fit(Fails(), runs.batches())

    found = outcomes(fails, tmp_path)
    assert all("on rank 1" in str(error) for error in found), found
    assert names(tmp_path) == ["last.json", "u2"]
