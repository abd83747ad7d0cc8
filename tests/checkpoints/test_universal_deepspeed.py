"""A checkpoint whose optimizer state lies in a folder of its own, as DeepSpeed's: made by hand, so that any machine
tries it. `tests/sharded/test_deepspeed.py` has the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import scalar
from ranks import outcomes
from trivet.checkpoint import directory
from trivet.errors import CheckpointError


def made(path: Path) -> Path:
    """What `capture` stores of a strategy with ``own_folder``."""
    trainer = scalar.trainer(max_steps=2)
    module = scalar.Scalar()
    module.on_train_end = lambda: trainer.save_checkpoint(path)
    trainer.fit(module, scalar.loader(4))
    state = directory.read(path)
    state.optimizers = [{"state": {}, "groups": [], "own_folder": "deepspeed"}]
    state.plan = {**state.plan, "strategy": "deepspeed"}

    def own(folder: Path) -> None:
        (folder / "deepspeed").mkdir()
        (folder / "deepspeed" / "latest").write_text("state")

    directory.write(path, state, rank=0, world_size=1, own=own)
    return path


def go_on(path: Path, strategy: str, devices: int) -> None:
    """Task: a fit from that checkpoint."""
    scalar.trainer(max_steps=4, strategy=strategy, devices=devices).fit(
        scalar.Scalar(), scalar.loader(4), ckpt_path=path
    )


def test_the_folder_belongs_to_the_checkpoint(tmp_path: Path) -> None:
    assert "deepspeed/latest" in directory.manifest(made(tmp_path / "made"))["files"]


def test_another_strategy_says_to_convert_it(tmp_path: Path) -> None:
    path = made(tmp_path / "made")
    for found in outcomes(go_on, path, "fsdp", 2):  # or what a rank hears of the other
        assert "strategy 'deepspeed' wrote the optimizer state" in str(found)
        assert f"trivet checkpoint convert {str(path)!r}" in str(found)
    with pytest.raises(CheckpointError, match="trivet checkpoint convert"):
        go_on(path, "single", 1)


def test_its_weights_are_there_as_always(tmp_path: Path) -> None:
    path = made(tmp_path / "made")
    assert directory.read_weights(path)["w"] == -1
    assert scalar.Scalar.load_from_checkpoint(path).w == -1
