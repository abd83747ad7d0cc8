"""Disks that say no, at each place where a checkpoint touches one, on one process or on one of two."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import scalar
import trivet
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory
from trivet.errors import CheckpointError, RankFailed

DENIED = PermissionError(errno.EACCES, "Permission denied")
FULL = OSError(errno.ENOSPC, "No space left on device")
# where it fails, and what the system says there
PLACES = {
    "directory": DENIED, "tensors": FULL, "tensor index": FULL, "state.pt": FULL, "manifest.json": FULL,
    "rename": DENIED, "last.json": FULL,
}  # fmt: skip


class Torn:
    """A file that is full after what it has."""

    def __init__(self, file, error):
        self.file, self.error = file, error

    def write(self, data):
        data = data if isinstance(data, str) else bytes(data)
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        raise self.error

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


@contextmanager
def refusing(where, name, error):
    """Everything about the checkpoint ``name`` that has to do with ``where`` fails."""
    real_open, path_open, mkdir, rename = builtins.open, Path.open, Path.mkdir, os.rename
    ends = {"tensors": ".distcp", "tensor index": ".metadata.tmp", "last.json": ".last.json.new"}.get(where, where)

    def hit(path):
        there = f".{name}.tmp-" in str(path)
        if where == "last.json":  # while that checkpoint is the newest
            there = (Path(path).parent / name).exists() and not (Path(path).parent / "u3").exists()
        return there and str(path).endswith(ends)

    def open_(file, mode="r", *args, **kwargs):
        found = real_open(file, mode, *args, **kwargs)
        return Torn(found, error) if hit(file) and "r" not in mode else found

    def open_path(path, mode="r", *args, **kwargs):
        found = path_open(path, mode, *args, **kwargs)
        return Torn(found, error) if hit(path) and "r" not in mode else found

    def make(path, *args, **kwargs):
        if where == "directory" and path.name.startswith(f".{name}.tmp-"):
            raise error
        return mkdir(path, *args, **kwargs)

    def move(source, target):
        if where == "rename" and Path(target).name == name:
            raise error
        return rename(source, target)

    with (
        patch.object(builtins, "open", open_), patch.object(Path, "open", open_path),
        patch.object(Path, "mkdir", make), patch.object(os, "rename", move),
    ):  # fmt: skip
        yield


def fit(place, where, rank, strategy="single", **options):
    """Three updates, each to be saved, where the second save fails on one rank. What became of it."""
    options = {"every_n_updates": 1, "save_last": True, "filename": "u{update}"} | options
    callback = Checkpoint(place, **options)
    trainer = scalar.trainer(max_steps=3, callbacks=[callback], enable_checkpointing=None, strategy=strategy)
    raised = ""
    here = int(os.environ.get("RANK", "0")) == rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with refusing(where if here else "", "u2", PLACES[where]):
            try:
                trainer.fit(scalar.Scalar(), scalar.loader([1.0] * 6))
            except (CheckpointError, RankFailed) as error:  # the latter where the other rank said so first
                raised = str(error)
    return {
        "raised": raised,
        "warned": [str(one.message) for one in caught if "checkpoint" in str(one.message)],
        "last": Path(callback.last_model_path).name,
        "best": Path(callback.best_model_path).name,
        "update": trainer.progress.update,
    }


def names(place):
    return sorted(path.name for path in place.iterdir() if path.name != "run.json")


def pointed(place):
    return json.loads((place / "last.json").read_text())["path"]


def loads(path):
    return directory.complete(path) and directory.read(path).module["w"].item() == -float(path.name[1:])


class Vanishes(trivet.Callback):
    """The directory goes after the first update."""

    saves = True

    def __init__(self, place, callback):
        self.place, self.callback = place, callback

    def on_update_end(self, trainer, module):
        if trainer.progress.update == 1:
            if self.callback._flying is not None:
                self.callback._flying.pending.join()
            shutil.rmtree(self.place)
