"""What the tests of saves behind the training do, on one process or on each of two."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import scalar
import torch
import trivet
from torch import nn
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory, staging, tensors
from trivet.errors import CheckpointError, RankFailed
from trivet.state import TrainState

BATCHES = 6


class Net(trivet.Module):
    """Dropout, a buffer that changes, tied weights, uneven shapes, a schedule per update."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 5))
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.net[0].weight

    def training_step(self, batch, batch_idx):
        loss = (self.tied(self.net(batch)) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trainer(strategy, callbacks, **options):
    options.setdefault("max_steps", BATCHES)
    options.setdefault("enable_checkpointing", None)
    return scalar.trainer(strategy=strategy, callbacks=callbacks, **options)


def batches():
    return torch.utils.data.DataLoader(torch.linspace(-1, 1, 4 * BATCHES * 5).reshape(-1, 5), 2, shuffle=True)


@contextmanager
def gated():
    """The writing of tensors waits for the event that this gives."""
    gate, write = threading.Event(), tensors.Writer.write_data

    def wait(self, *args):
        assert gate.wait(30)
        return write(self, *args)

    with patch.object(tensors.Writer, "write_data", wait):
        yield gate


@contextmanager
def slow(seconds, log):
    """Writing tensors takes long; ``log`` gets how many were writing, whenever one began."""
    active, write = [0], tensors.Writer.write_data

    def wait(self, *args):
        active[0] += 1
        log.append(active[0])
        time.sleep(seconds)
        try:
            return write(self, *args)
        finally:
            active[0] -= 1

    with patch.object(tensors.Writer, "write_data", wait):
        yield


@contextmanager
def full_disk(which, here=True):
    """Writing tensors fails at the save of that number."""
    count, write = [0], tensors.Writer.write_data

    def fail(self, *args):
        count[0] += 1
        if count[0] == which and here:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *args)

    with patch.object(tensors.Writer, "write_data", fail):
        yield


class Both(trivet.Callback):
    """Saves each state twice, and lets the asynchronous save write only when the next update has changed it all."""

    saves = True

    def __init__(self, place: Path, gate: threading.Event) -> None:
        self.place, self.gate, self.pending = place, gate, None

    def on_update_end(self, trainer, module):
        if self.pending is not None:
            self.gate.set()
            self.pending.wait()
            self.gate.clear()
        update = trainer.progress.update
        if update % 2:
            self.gate.set()
            trainer.save_checkpoint(self.place / f"sync-{update}", metrics={"a": 1.0})
            self.gate.clear()
            self.pending = trainer.save_checkpoint_async(self.place / f"async-{update}", metrics={"a": 1.0})
            assert not self.pending.done

    def on_train_end(self, trainer, module):
        self.gate.set()

    def on_exception(self, trainer, module, exception):
        self.gate.set()


def save_both_ways(place, strategy):
    """How many tensors were copied at each save."""
    staged = []
    stage = staging.Buffers.stage

    def counted(self, state):
        staged.append(len(state[tensors.ALL]))
        return stage(self, state)

    with gated() as gate, patch.object(staging.Buffers, "stage", counted):
        trainer(strategy, [Both(place, gate)], enable_checkpointing=False).fit(Net(), batches())
    return staged


def assert_same(a, b, where=""):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{number}")
    else:
        assert a == b, where


def assert_same_checkpoints(one, other):
    a, b = directory.read(one), directory.read(other)
    for field in fields(TrainState):
        assert_same(getattr(a, field.name), getattr(b, field.name), field.name)
    a, b = directory.manifest(one), directory.manifest(other)
    assert_same({**a, "files": 0, "created": 0}, {**b, "files": 0, "created": 0})
    assert {n: e["size"] for n, e in a["files"].items()} == {n: e["size"] for n, e in b["files"].items()}


class Told(trivet.Callback):
    """What the attributes said after each update."""

    def __init__(self, callback):
        self.callback, self.seen = callback, []

    def on_update_end(self, trainer, module):
        self.seen.append(Path(self.callback.last_model_path).name)
        for path in (self.callback.last_model_path, self.callback.best_model_path):
            assert not path or directory.complete(path), path


def checkpoint(place, **options):
    options = {"every_n_updates": 1, "save_async": True, "save_last": True, "filename": "u{update}"} | options
    return Checkpoint(place, **options)


def one_in_flight(place, strategy):
    """Slow writing: how many wrote at once, what the attributes said, and where it ended."""
    log = []
    callback = checkpoint(place)
    told = Told(callback)
    with slow(0.03, log):
        trainer(strategy, [callback, told]).fit(Net(), batches())
    return log, told.seen, Path(callback.last_model_path).name


def failing(place, strategy, which, policy, rank, max_steps=BATCHES):
    """The save of that number fails on one rank: what was raised, what was warned of, and where the books stand."""
    callback = checkpoint(place, on_save_error=policy, save_top_k=-1)
    fit = trainer(strategy, [callback], max_steps=max_steps)
    raised = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with full_disk(which, here=int(os.environ.get("RANK", "0")) == rank):
                fit.fit(Net(), batches())
        except (CheckpointError, RankFailed) as error:  # of the rank that was the first to say so
            raised = str(error)
    texts = [str(one.message) for one in caught if "checkpoint" in str(one.message)]
    return raised, texts, Path(callback.last_model_path).name, fit.progress.update
