"""Writing a checkpoint: complete or not at all, while the caller waits. `background` writes behind the training."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import addressable
from ..state import TrainState
from . import manifest as manifests
from .agree import agreed
from .files import Place, Remote, place
from .parts import AS_TENSORS, OPTIMIZER_TENSORS, STATE, TENSORS, errors
from .places import begin, discard, locked, publish, sync_directory
from .plain import check_plain
from .sums import Sum, write_summed


def write(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    rank: int,
    world_size: int,
    metrics: dict[str, float] | None = None,
    own: Callable[[Path], None] | None = None,
) -> None:
    """Write ``state`` as the checkpoint directory ``path``; a collective: all ranks call it, with the same path.

    Tensors may be sharded (`DTensor`); everything else is taken from rank 0. ``metrics`` are values that belong to
    exactly these weights; the manifest records them. ``own`` is called on all ranks with the directory, to write what
    only the strategy can read; it returns when all ranks have written. A checkpoint that already has this name is
    replaced, and stays until the new one is complete; any other thing of this name is left alone and refused.

    Raises on all ranks, whichever rank it happened on: `CheckpointError` with path and reason, `ConfigurationError`
    naming the key of a value that is not plain data.
    """
    target = place(path)
    with errors(f"cannot write checkpoint {str(target)!r}"):
        tensors, plain = split(state)
        temporary = agreed(partial(prepare, target, plain), rank=rank, world_size=world_size)
        draft = Draft(temporary, target, lambda file: torch.save(plain, file), header(state, metrics, world_size))
        try:
            with locked(temporary, rank == 0):
                from . import tensors as storage

                if own is not None:
                    if isinstance(temporary, Remote):
                        raise CheckpointError(
                            "the strategy writes a folder of its own, which takes a path of this machine"
                        )
                    own(temporary)
                storage.write(temporary / TENSORS, tensors, distributed=world_size > 1, finish=draft.finish)
        except BaseException:
            draft.discard(rank)
            raise


@dataclass(frozen=True)
class Draft:
    """A checkpoint that grows in ``temporary`` until it is complete. ``plain`` writes ``state.pt`` to a file."""

    temporary: Place
    target: Place
    plain: Callable[[Any], object]
    header: dict[str, Any]

    def finish(self, sums: dict[str, Sum]) -> None:
        """On rank 0, when all ranks have written their tensors: add what is missing and give it its name.

        ``sums`` are those of the files with tensors."""
        _check_visible(self.temporary / TENSORS, self.header["world_size"])
        files = {f"{TENSORS}/{name}": one for name, one in sums.items()}
        files[STATE] = write_summed(self.temporary / STATE, self.plain)
        sync_directory(self.temporary / TENSORS)
        manifests.write(self.temporary, manifests.make(self.temporary, sums=files, **self.header))
        sync_directory(self.temporary)
        publish(self.temporary, self.target)

    def discard(self, rank: int) -> None:
        """It will never be complete."""
        if rank == 0:
            discard(self.temporary)


def prepare(target: Place, plain: dict[str, Any]) -> Place:
    """On rank 0, before anything is written: whether it can be, and the directory to write into."""
    for name, value in plain.items():
        check_plain(value, name)
    return begin(target)


def header(state: TrainState, metrics: dict[str, float] | None, world_size: int) -> dict[str, Any]:
    """What the manifest says beside the files."""
    return {"progress": state.progress, "plan": state.plan, "metrics": metrics, "world_size": world_size}


def split(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that are stored as such, by name, and the content of ``state.pt``."""
    tensors = {f"module/{name}": tensor.detach() for name, tensor in state.module.items()}
    tensors.update({f"beside/{name}": tensor.detach() for name, tensor in state.beside.items()})
    tensors.update({f"strategy/{name}": tensor.detach() for name, tensor in state.strategy.items()})
    plain: dict[str, Any] = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in AS_TENSORS}
    plain["optimizers"] = []
    for number, optimizer in enumerate(state.optimizers):
        rest: dict[str, dict[str, Any]] = {}
        keys: dict[str, list[str]] = {}
        for parameter, values in optimizer["state"].items():
            keys[parameter] = [key for key, value in values.items() if isinstance(value, Tensor)]
            rest[parameter] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            tensors.update({f"optimizer/{number}/{parameter}/{key}": values[key].detach() for key in keys[parameter]})
        plain["optimizers"].append({**optimizer, "state": rest, OPTIMIZER_TENSORS: keys})
    return {name: addressable(tensor) for name, tensor in tensors.items()}, plain


def _check_visible(directory: Place, world_size: int) -> None:
    """What the other ranks wrote must be seen by rank 0, which will say in the manifest that it is there."""
    from . import tensors as storage

    for name, size in storage.files(storage.metadata(directory)).items():
        file = directory / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < size:
            where = " by rank 0; is the directory on a file system that all ranks share?" if world_size > 1 else ""
            raise CheckpointError(f"{name} was written with {size} bytes, and {found or 0} are found{where}")
