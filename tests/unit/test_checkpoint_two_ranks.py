"""One start of two gloo processes for all checks, since starting costs seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trivet.checkpoint import directory
from trivet.state import TrainState

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks of checkpoint_worker.py have written; they checked what can be checked on their side."""
    place = tmp_path_factory.mktemp("ranks")
    alone = TrainState(module={"w": torch.arange(6.0).reshape(3, 2)}, progress={"update": 1})
    directory.write(place / "by_one", alone, rank=0, world_size=1)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(WORKER), str(place)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    return place


def test_replicated_tensors_are_rank_zeros_and_written_once(place: Path) -> None:
    state = directory.read(place / "replicated")
    assert torch.equal(state.module["buffer"], torch.zeros(2))
    assert torch.equal(state.optimizers[0]["state"]["w"]["exp_avg"], torch.ones(3, 2))
    files = directory.manifest(place / "replicated")["files"]
    assert files["tensors/__0_0.distcp"]["size"] > 0
    assert files.get("tensors/__1_0.distcp", {"size": 0})["size"] == 0


def test_sharded_tensors_are_read_by_one_process(place: Path) -> None:
    state = directory.read(place / "sharded")
    assert torch.equal(state.module["w"], torch.arange(10.0).reshape(5, 2))
    assert torch.equal(state.optimizers[0]["state"]["w"]["exp_avg"], torch.arange(10.0).reshape(5, 2) / 2)
    assert directory.manifest(place / "sharded")["world_size"] == 2
    assert torch.equal(directory.read_weights(place / "sharded")["w"], state.module["w"])


def test_failed_saves_left_nothing(place: Path) -> None:
    assert sorted(p.name for p in place.iterdir() if p.is_dir()) == ["by_callback", "by_one", "replicated", "sharded"]
    assert torch.equal(directory.read(place / "replicated").module["buffer"], torch.zeros(2))


def test_the_callback_decides_on_rank_zero(place: Path) -> None:
    assert sorted(p.name for p in (place / "by_callback").iterdir()) == ["epoch=0-update=2", "last.json"]
