"""C14: a checkpoint that cannot be written is an error with path and reason, and nothing points at it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import scalar
from ranks import run

sys.path.append(str(Path(__file__).resolve().parents[1] / "checkpoints"))

import honest_runs as runs
from trivet.callbacks.checkpoint import Checkpoint
from trivet.errors import CheckpointError

TWO_RANKS = [("tensors", 0), ("tensors", 1), ("manifest.json", 0), ("last.json", 0)]
WHERE = [(where, 1, 0) for where in runs.PLACES] + [(where, 2, rank) for where, rank in TWO_RANKS]


def strategy(world_size):
    return "single" if world_size == 1 else "ddp"


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize(("where", "world_size", "rank"), WHERE)
def test_training_ends_and_the_pointers_name_the_last_complete_one(tmp_path, where, world_size, rank, save_async):
    options = {"save_async": save_async}
    found = run(world_size, lambda *a: runs.fit(*a, **options), tmp_path, where, rank, strategy(world_size))
    later = save_async and where != "directory"  # a failure in the thread surfaces at the next save
    for one in found:
        assert f"{tmp_path}/u2" in one["raised"]
        assert runs.PLACES[where].strerror in one["raised"]
        assert one["update"] == (3 if later else 2)
        assert one["last"] == one["best"] == ("u2" if where == "last.json" else "u1")
        assert runs.loads(tmp_path / one["last"])
    assert runs.pointed(tmp_path) == "u1"
    assert runs.loads(tmp_path / "u1")
    assert [n for n in runs.names(tmp_path) if not n.startswith(".last")] == (
        ["last.json", "u1", "u2"] if where == "last.json" else ["last.json", "u1"]
    )


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize(("where", "world_size", "rank"), WHERE)
def test_with_warn_training_goes_on_and_warns_once(tmp_path, where, world_size, rank, save_async):
    options = {"save_async": save_async, "on_save_error": "warn"}
    found = run(world_size, lambda *a: runs.fit(*a, **options), tmp_path, where, rank, strategy(world_size))
    for number, one in enumerate(found):
        assert one["raised"] == ""
        assert (one["update"], one["last"], one["best"]) == (3, "u3", "u3")
        assert len(one["warned"]) == (number == 0)
    (text,) = found[0]["warned"]
    assert f"{tmp_path}/u2" in text
    assert runs.PLACES[where].strerror in text
    assert runs.pointed(tmp_path) == "u3"
    assert [n for n in runs.names(tmp_path) if not n.startswith(".last")] == ["last.json", "u3"]
    assert runs.loads(tmp_path / "u3")


@pytest.mark.parametrize("save_async", [False, True])
def test_a_directory_that_vanished_is_not_made_again(tmp_path, save_async):
    place = tmp_path / "c"
    callback = Checkpoint(place, every_n_updates=1, save_async=save_async, filename="u{update}")
    trainer = scalar.trainer(
        max_steps=3, callbacks=[callback, runs.Vanishes(place, callback)], enable_checkpointing=None
    )
    with pytest.raises(CheckpointError, match=f"(?s){place}.*(gone|No such file|FileNotFoundError)"):
        trainer.fit(scalar.Scalar(), scalar.loader([1.0] * 3))
    assert trainer.progress.update == 2
    assert not list(place.glob("u*"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_directory_that_cannot_be_written_is_found_out_before_the_first_update(tmp_path, world_size):
    (tmp_path / "file").write_text("no directory")

    def fit():
        callbacks = [Checkpoint(tmp_path / "file/checkpoints")]
        trainer = scalar.trainer(
            max_steps=1, strategy=strategy(world_size), enable_checkpointing=None, callbacks=callbacks
        )
        with pytest.raises(Exception, match=f"Not a directory: '{tmp_path}/file") as caught:
            trainer.fit(scalar.Scalar(), scalar.loader([1.0, 1.0]))
        return str(caught.value), trainer.progress.update

    for _, update in run(world_size, fit):
        assert update == 0
