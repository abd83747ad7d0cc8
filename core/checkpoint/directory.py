"""A checkpoint as a directory: written complete or not at all, read whole or with nothing changed.

``tensors/`` holds module and optimizer tensors (`torch.distributed.checkpoint`), ``state.pt`` everything else
(``torch.save``, loadable with ``weights_only=True``), ``manifest.json``, written last, says what belongs to it. A
directory without its manifest is no checkpoint. Everything is written in ``.<name>.tmp-<random>`` beside the target and
renamed when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError, TrivetError
from ..layout import sharded
from ..state import TrainState
from . import manifest as manifests
from .agree import agreed
from .places import begin, delete, locked, publish, sweep, sync_directory
from .plain import check_plain
from .sums import write_summed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["complete", "delete", "manifest", "read", "read_seed", "read_weights", "sweep", "write"]

_TENSORS = "tensors"
_STATE = "state.pt"
_AS_TENSORS = {"module", "beside"}  # fields of a TrainState that are not in state.pt
_OPTIMIZER_TENSORS = "tensors"  # in state.pt, per optimizer: parameter name -> keys whose values are in tensors/


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
    target = Path(path).absolute()
    with _errors(f"cannot write checkpoint {str(target)!r}"):
        tensors, plain = _split(state)

        def prepare() -> Path:
            for name, value in plain.items():
                check_plain(value, name)
            return begin(target)

        temporary = agreed(prepare, rank=rank, world_size=world_size)
        try:
            with locked(temporary, rank == 0):
                from . import tensors as storage

                sums = {
                    f"{_TENSORS}/{name}": one
                    for name, one in storage.write(temporary / _TENSORS, tensors, distributed=world_size > 1).items()
                }
                if own is not None:
                    own(temporary)

                def finish() -> None:
                    _check_visible(temporary / _TENSORS, world_size)
                    sums[_STATE] = write_summed(temporary / _STATE, lambda file: torch.save(plain, file))
                    sync_directory(temporary / _TENSORS)
                    values = manifests.make(
                        temporary, sums, progress=state.progress, plan=state.plan, metrics=metrics,
                        world_size=world_size,
                    )  # fmt: skip
                    manifests.write(temporary, values)
                    sync_directory(temporary)
                    publish(temporary, target)

                agreed(finish, rank=rank, world_size=world_size)
        except BaseException:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise


def read(path: str | os.PathLike[str], template: TrainState | None = None, *, beside: bool = True) -> TrainState:
    """Read a checkpoint, whatever strategy wrote it at whatever world size. No collective: each rank reads for itself.

    ``template.module`` and ``beside``, where given, name the tensors to fill in place, on their device and in their
    dtype; of a `DTensor` this rank's part is read, and of the optimizer state that belongs to it. All other tensors are
    new, plain and on the CPU. With ``beside=False`` nothing is read that callbacks keep. Raises `CheckpointError` with
    path and reason if files are missing or damaged, or if names or shapes differ from the template's; plain tensors
    have not changed then.
    """
    directory = Path(path).absolute()
    with _errors(f"cannot read checkpoint {str(directory)!r}"):
        _, index = _open(directory)
        plain = _read_state(directory)
        targets = None
        if template is not None:
            targets = {f"module/{name}": tensor for name, tensor in template.module.items()}
            targets.update({f"beside/{name}": tensor for name, tensor in template.beside.items()})
            _check_fits(index, targets, ("module/", "beside/") if beside else ("module/",))
        names = [name for name in index.state_dict_metadata if beside or not name.startswith("beside/")]
        into = {name: _staging(index, name, targets) for name in names}
        optimizers = _join(plain.pop("optimizers"), into)
        from . import tensors as storage

        storage.read(directory / _TENSORS, index, into)
        if targets is not None:
            # Read first, then copied: a damaged file is found before the first of the caller's tensors changes.
            with torch.no_grad():
                for name, target in targets.items():
                    if into[name] is not target:
                        target.copy_(into[name])
            into |= targets
        return TrainState(
            module={name.removeprefix("module/"): t for name, t in into.items() if name.startswith("module/")},
            beside={name.removeprefix("beside/"): t for name, t in into.items() if name.startswith("beside/")},
            optimizers=optimizers,
            **plain,
        )


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The module's tensors by the user's names, plain and on the CPU. Needs no process group."""
    directory = Path(path).absolute()
    with _errors(f"cannot read checkpoint {str(directory)!r}"):
        from . import tensors as storage

        _, index = _open(directory)
        into = {name: storage.empty(index, name) for name in index.state_dict_metadata if name.startswith("module/")}
        storage.read(directory / _TENSORS, index, into)
        return {name.removeprefix("module/"): tensor for name, tensor in into.items()}


def read_seed(path: str | os.PathLike[str]) -> int:
    """The seed of the run that wrote a checkpoint. Reads no tensors."""
    directory = Path(path).absolute()
    with _errors(f"cannot read checkpoint {str(directory)!r}"):
        manifests.read(directory)
        return int(_read_state(directory)["seed"])


def read_user(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the user's objects put into a checkpoint: ``hparams``, ``user``, ``datamodule``. Reads no tensors."""
    directory = Path(path).absolute()
    with _errors(f"cannot read checkpoint {str(directory)!r}"):
        manifests.read(directory)
        plain = _read_state(directory)
        return {name: plain[name] for name in ("hparams", "user", "datamodule")}


def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint: format, versions, progress, plan, metrics, files. Reads nothing else."""
    return manifests.read(Path(path).absolute())


def complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a checkpoint whose files are all there with the sizes that its manifest lists."""
    directory = Path(path).absolute()
    try:
        manifests.check_files(directory, manifests.read(directory))
    except CheckpointError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- writing


def _split(state: TrainState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"module/{name}": tensor.detach() for name, tensor in state.module.items()}
    tensors.update({f"beside/{name}": tensor.detach() for name, tensor in state.beside.items()})
    plain: dict[str, Any] = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in _AS_TENSORS}
    plain["optimizers"] = []
    for number, optimizer in enumerate(state.optimizers):
        rest: dict[str, dict[str, Any]] = {}
        keys: dict[str, list[str]] = {}
        for parameter, values in optimizer["state"].items():
            keys[parameter] = [key for key, value in values.items() if isinstance(value, Tensor)]
            rest[parameter] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            tensors.update({f"optimizer/{number}/{parameter}/{key}": values[key].detach() for key in keys[parameter]})
        plain["optimizers"].append({**optimizer, "state": rest, _OPTIMIZER_TENSORS: keys})
    return tensors, plain


def _check_visible(directory: Path, world_size: int) -> None:
    """What the other ranks wrote must be seen by rank 0, which will say in the manifest that it is there."""
    from . import tensors as storage

    for name, size in storage.files(storage.metadata(directory)).items():
        file = directory / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < size:
            where = " by rank 0; is the directory on a file system that all ranks share?" if world_size > 1 else ""
            raise CheckpointError(f"{name} was written with {size} bytes, and {found or 0} are found{where}")


# ------------------------------------------------------------------------------------------------------------- reading


def _open(directory: Path) -> tuple[dict[str, Any], Metadata]:
    values = manifests.read(directory)
    manifests.check_files(directory, values)
    from . import tensors as storage

    listed = values["files"]
    for name in (_STATE, f"{_TENSORS}/.metadata"):
        if name not in listed:
            raise CheckpointError(f"its manifest does not list {name!r}")
    index = storage.metadata(directory / _TENSORS)
    for name, size in storage.files(index).items():
        if listed.get(f"{_TENSORS}/{name}", {"size": -1})["size"] < size:
            raise CheckpointError(f"its tensor index wants {size} bytes of the file {name!r}, which the manifest lacks")
    return values, index


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        plain = torch.load(directory / _STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError, KeyError, ... on damaged files
        raise CheckpointError(f"{_STATE} cannot be loaded as plain data: {type(error).__name__}: {error}") from error
    expected = {f.name for f in fields(TrainState)} - _AS_TENSORS
    if not isinstance(plain, dict) or set(plain) != expected:
        found = sorted(map(str, plain)) if isinstance(plain, dict) else type(plain).__name__
        raise CheckpointError(f"{_STATE} holds {found}, expected {sorted(expected)}")
    return plain


def _check_fits(index: Metadata, targets: dict[str, Tensor], prefixes: tuple[str, ...]) -> None:
    stored = {name: entry for name, entry in index.state_dict_metadata.items() if name.startswith(prefixes)}
    wrong = [f"missing in the checkpoint: {_names(set(targets) - set(stored))}"] if set(targets) - set(stored) else []
    for prefix, where in (("module/", "not in the module"), ("beside/", "kept by a callback that this run has not")):
        if odd := {name for name in stored if name.startswith(prefix)} - set(targets):
            wrong.append(f"{where}: {_names(odd)}")
    for name in sorted(set(stored) & set(targets)):
        entry: Any = stored[name]
        target = targets[name]
        if tuple(entry.size) != tuple(target.shape):
            wrong.append(f"{_names([name])} has shape {tuple(entry.size)}, the module's has {tuple(target.shape)}")
        elif entry.properties.dtype.is_floating_point != target.dtype.is_floating_point:
            wrong.append(f"{_names([name])} is {entry.properties.dtype}, the module's is {target.dtype}")
    if wrong:
        raise CheckpointError(f"it does not fit the module: {'; '.join(wrong)}")


def _names(names: set[str] | list[str]) -> str:
    return ", ".join(repr(name.partition("/")[2]) for name in sorted(names))


def _staging(index: Metadata, name: str, targets: dict[str, Tensor] | None) -> Tensor:
    from . import tensors as storage

    entry: Any = index.state_dict_metadata[name]
    target = targets.get(name) if targets is not None else None
    if target is not None:
        # Sharded tensors are read in place: a model that is sharded for its size doesn't fit twice.
        in_place = sharded(target) is not None and entry.properties.dtype == target.dtype
        return target if in_place else torch.empty_like(target.detach())
    if targets is not None and name.startswith("optimizer/"):
        like = targets.get(f"module/{name.split('/', 2)[2].rpartition('/')[0]}")
        if like is not None and sharded(like) is not None and entry.size == like.shape:
            return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    return storage.empty(index, name)


def _join(stored: Any, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    optimizers = []
    try:
        for number, optimizer in enumerate(stored):
            state = {}
            for parameter, keys in optimizer[_OPTIMIZER_TENSORS].items():
                found = {key: tensors[f"optimizer/{number}/{parameter}/{key}"] for key in keys}
                state[parameter] = {**optimizer["state"][parameter], **found}
            rest = {key: value for key, value in optimizer.items() if key != _OPTIMIZER_TENSORS}
            optimizers.append({**rest, "state": state})
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"its optimizer state is damaged: {type(error).__name__}: {error}") from error
    return optimizers


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise error if str(error).startswith("cannot ") else CheckpointError(f"{what}: {error}") from error
    except TrivetError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
