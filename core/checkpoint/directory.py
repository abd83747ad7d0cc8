"""A checkpoint as a directory: written complete or not at all, read whole or with nothing changed.

``tensors/`` holds module and optimizer tensors (`torch.distributed.checkpoint`), ``state.pt`` everything else
(``torch.save``, loadable with ``weights_only=True``), ``manifest.json``, written last, says what belongs to it. A
directory without its manifest is no checkpoint. Everything is written in ``.<name>.tmp-<random>`` beside the target and
renamed when it is complete.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import sharded
from ..state import TrainState
from . import manifest as manifests
from .parts import AS_TENSORS, OPTIMIZER_TENSORS, STATE, TENSORS, errors
from .places import delete, sweep
from .writing import write

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["complete", "delete", "manifest", "read", "read_seed", "read_weights", "sweep", "write"]


def read(path: str | os.PathLike[str], template: TrainState | None = None, *, beside: bool = True) -> TrainState:
    """Read a checkpoint, whatever strategy wrote it at whatever world size. No collective: each rank reads for itself.

    ``template.module`` and ``beside``, where given, name the tensors to fill in place, on their device and in their
    dtype; of a `DTensor` this rank's part is read, and of the optimizer state that belongs to it. All other tensors are
    new, plain and on the CPU. With ``beside=False`` nothing is read that callbacks keep. Raises `CheckpointError` with
    path and reason if files are missing or damaged, or if names or shapes differ from the template's; plain tensors
    have not changed then.
    """
    directory = Path(path).absolute()
    with errors(f"cannot read checkpoint {str(directory)!r}"):
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

        storage.read(directory / TENSORS, index, into)
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
    with errors(f"cannot read checkpoint {str(directory)!r}"):
        from . import tensors as storage

        _, index = _open(directory)
        into = {name: storage.empty(index, name) for name in index.state_dict_metadata if name.startswith("module/")}
        storage.read(directory / TENSORS, index, into)
        return {name.removeprefix("module/"): tensor for name, tensor in into.items()}


def read_seed(path: str | os.PathLike[str]) -> int:
    """The seed of the run that wrote a checkpoint. Reads no tensors."""
    directory = Path(path).absolute()
    with errors(f"cannot read checkpoint {str(directory)!r}"):
        manifests.read(directory)
        return int(_read_state(directory)["seed"])


def read_user(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the user's objects put into a checkpoint: ``hparams``, ``user``, ``datamodule``. Reads no tensors."""
    directory = Path(path).absolute()
    with errors(f"cannot read checkpoint {str(directory)!r}"):
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


# ------------------------------------------------------------------------------------------------------------- reading


def _open(directory: Path) -> tuple[dict[str, Any], Metadata]:
    values = manifests.read(directory)
    manifests.check_files(directory, values)
    from . import tensors as storage

    listed = values["files"]
    for name in (STATE, f"{TENSORS}/.metadata"):
        if name not in listed:
            raise CheckpointError(f"its manifest does not list {name!r}")
    index = storage.metadata(directory / TENSORS)
    for name, size in storage.files(index).items():
        if listed.get(f"{TENSORS}/{name}", {"size": -1})["size"] < size:
            raise CheckpointError(f"its tensor index wants {size} bytes of the file {name!r}, which the manifest lacks")
    return values, index


def _read_state(directory: Path) -> dict[str, Any]:
    try:
        plain = torch.load(directory / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError, KeyError, ... on damaged files
        raise CheckpointError(f"{STATE} cannot be loaded as plain data: {type(error).__name__}: {error}") from error
    expected = {f.name for f in fields(TrainState)} - AS_TENSORS
    if not isinstance(plain, dict) or set(plain) != expected:
        found = sorted(map(str, plain)) if isinstance(plain, dict) else type(plain).__name__
        raise CheckpointError(f"{STATE} holds {found}, expected {sorted(expected)}")
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
            for parameter, keys in optimizer[OPTIMIZER_TENSORS].items():
                found = {key: tensors[f"optimizer/{number}/{parameter}/{key}"] for key in keys}
                state[parameter] = {**optimizer["state"][parameter], **found}
            rest = {key: value for key, value in optimizer.items() if key != OPTIMIZER_TENSORS}
            optimizers.append({**rest, "state": state})
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"its optimizer state is damaged: {type(error).__name__}: {error}") from error
    return optimizers
