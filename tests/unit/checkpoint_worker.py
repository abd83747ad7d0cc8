"""What each of two gloo processes does in test_checkpoint_two_ranks.py: ``python checkpoint_worker.py PLACE RANK``."""

from __future__ import annotations

import builtins
import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory
from trivet.errors import CheckpointError, ConfigurationError
from trivet.state import Progress, TrainState


def replicated(rank: int) -> TrainState:
    adam = {"w": {"exp_avg": torch.ones(3, 2)}}
    return TrainState(
        module={"w": torch.ones(3, 2), "buffer": torch.full((2,), float(rank))},
        optimizers=[{"state": adam, "groups": []}],
    )


def raises(kind: type[Exception], *parts: str, function: Any) -> None:
    with pytest.raises(kind) as caught:
        function()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


class NoSpace(OSError):
    """An error that doesn't pickle must not leave the other rank waiting."""

    def __reduce__(self) -> Any:
        raise TypeError("this does not pickle")


def check_failures(place: Path, rank: int) -> None:
    real = Path.open

    def no_space(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.suffix == ".distcp":
            raise NoSpace(errno.ENOSPC, "No space left on device")
        return real(path, *args, **kwargs)

    def write(name: str, state: TrainState) -> Any:
        return lambda: directory.write(place / name, state, rank=rank, world_size=2)

    # rank 1 alone cannot write its part
    with patch.object(Path, "open", no_space if rank == 1 else real):
        for name in ("failed", "replicated"):
            raises(
                CheckpointError, "cannot write", name, "rank 1", "No space left", function=write(name, replicated(1))
            )
    # rank 0 alone cannot write the rest
    opened = builtins.open

    def denied(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).endswith("state.pt"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(file, *args, **kwargs)

    with patch.object(builtins, "open", denied if rank == 0 else opened):
        raises(CheckpointError, "cannot write", "Permission denied", function=write("failed", replicated(rank)))
    bad = replicated(rank)
    bad.user = {"x": object()}
    raises(ConfigurationError, "user['x']", function=write("failed", bad))


def check_sharded(place: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(10.0).reshape(5, 2)
    shard = distribute_tensor(full, mesh, [Shard(0)])
    state = TrainState(module={"w": shard}, optimizers=[{"state": {"w": {"exp_avg": shard / 2}}, "groups": []}])
    directory.write(place / "sharded", state, rank=rank, world_size=2)
    target = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    found = directory.read(place / "sharded", TrainState(module={"w": target}))
    assert found.module["w"] is target
    assert isinstance(target, DTensor)
    assert torch.equal(target.to_local(), shard.to_local())
    assert torch.equal(target.full_tensor(), full)
    # what one process wrote
    target = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    directory.read(place / "by_one", TrainState(module={"w": target}))
    assert torch.equal(target.full_tensor(), torch.arange(6.0).reshape(3, 2))


def check_callback(place: Path, rank: int) -> None:
    """The ranks see different metrics and directories; rank 0's count."""
    callback = Checkpoint(
        place / ("by_callback" if rank == 0 else "elsewhere"), monitor="loss", every_n_updates=1, save_last=True
    )
    trainer: Any = SimpleNamespace(
        progress=Progress(), callback_metrics={}, world_size=2, global_rank=rank, is_global_zero=rank == 0,
        validation_due=False, log_every_n_steps=1, log_dir=place, resumed_from=None,
        save_checkpoint=lambda path, metrics: directory.write(
            path, replicated(rank), rank=rank, world_size=2, metrics=metrics
        ),
    )  # fmt: skip
    callback.on_train_start(trainer, None)  # type: ignore[arg-type]
    for update, loss in enumerate((2.0, 1.0), start=1):
        trainer.progress.update = update
        trainer.callback_metrics = {"loss": loss if rank == 0 else -loss}
        callback.on_update_end(trainer, None)  # type: ignore[arg-type]
    states: list[Any] = [None, None]
    dist.all_gather_object(states, callback.state_dict())
    assert states[0] == states[1]
    assert callback.best_model_score == 1.0


def main() -> None:
    place, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    directory.write(place / "replicated", replicated(rank), rank=rank, world_size=2)
    check_sharded(place, rank)
    check_failures(place, rank)
    check_callback(place, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
