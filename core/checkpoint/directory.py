"""A checkpoint as a directory: written complete or not at all, read whole or with nothing changed.

``tensors/`` holds module and optimizer tensors (`torch.distributed.checkpoint`), ``state.pt`` everything else
(``torch.save``, loadable with ``weights_only=True``), ``manifest.json``, written last, says what belongs to it. A
directory without its manifest is no checkpoint. Everything is written in ``.<name>.tmp-<random>`` beside the target and
renamed when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import sharded
from ..state import TrainState
from . import manifest as manifests
from .contents import Contents, open_checkpoint, read_state
from .files import Place, place
from .index import Entry
from .parts import OPTIMIZER_TENSORS, RANKS, SHARED, TENSORS, errors
from .places import delete, sweep
from .reader import Wanted
from .sums import Checks
from .writing import write

__all__ = ["complete", "delete", "manifest", "read", "read_seed", "read_weights", "sweep", "write"]

PART = 1 << 18  # elements


def read(
    path: str | os.PathLike[str], template: TrainState | None = None, *, beside: bool = True, rank: int | None = None
) -> TrainState:
    """Read a checkpoint, whatever strategy wrote it at whatever world size. No collective: each rank reads for itself.

    ``template.module`` and ``beside``, where given, name the tensors to fill in place, on their device and in their
    dtype; of a `DTensor` this rank's part is read, and of the optimizer state that belongs to it. All other tensors are
    new, plain and on the CPU. With ``beside=False`` nothing is read that callbacks or the strategy keep; with a
    ``rank`` nothing that the strategy kept for another. Raises `CheckpointError` with path and reason if files are
    missing or damaged, which their checksums say, or if names or shapes differ from the template's; the template has
    not changed then.
    """
    with reading(path, template, beside=beside, rank=rank) as state:
        return state


@contextmanager
def reading(
    path: str | os.PathLike[str],
    template: TrainState | None = None,
    *,
    beside: bool = True,
    rank: int | None = None,
    before: Callable[[], object] = lambda: None,
) -> Iterator[TrainState]:
    """`read`; an exception that leaves the block gives the template's plain tensors their values back.

    ``before`` is called when all files that this rank reads are found to be what was written, and no tensor of the
    template has changed yet; what it raises leaves them as they are.
    """
    directory = place(path)
    with errors(f"cannot read checkpoint {str(directory)!r}"):
        found = open_checkpoint(directory)
        index, plain = found.index, found.state()
        targets: dict[str, Tensor] = {}
        if template is not None:
            targets = {f"module/{name}": tensor for name, tensor in template.module.items()}
            targets.update({f"beside/{name}": tensor for name, tensor in template.beside.items()})
            _check_fits(index, targets, ("module/", "beside/") if beside else ("module/",))
        others = ("beside/", "strategy/") if not beside else RANKS if rank is not None else ()
        mine = f"{RANKS}{rank}/" if beside else ()
        names = [name for name in index if name.startswith(mine) or not name.startswith(others)]
        into = {name: _staging(index, name, targets) for name in names}
        in_place = {name: tensor for name, tensor in into.items() if tensor is targets.get(name)}
        optimizers = _join(plain.pop("optimizers"), into)
        with closing(Checks(directory, found.manifest["files"])) as checks:
            # Read first, then copied: a damaged file is found before the first of the caller's tensors changes.
            _fill(found, {name: tensor for name, tensor in into.items() if name not in in_place}, checks)
            if in_place:
                _fill(found, in_place, checks, before)
            else:
                before()
        copied = [(target, into[name]) for name, target in targets.items() if name not in in_place]
        into |= targets
        state = TrainState(
            module={name.removeprefix("module/"): t for name, t in into.items() if name.startswith("module/")},
            beside={name.removeprefix("beside/"): t for name, t in into.items() if name.startswith("beside/")},
            strategy={name.removeprefix("strategy/"): t for name, t in into.items() if name.startswith("strategy/")},
            optimizers=optimizers,
            **plain,
        )
        _exchange(copied)
    try:
        yield state
    except BaseException:
        _exchange(copied[::-1])  # last first: tied weights are several names of one tensor
        raise


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The module's tensors by the user's names, plain and on the CPU. Needs no process group."""
    directory = place(path)
    with errors(f"cannot read checkpoint {str(directory)!r}"):
        found = open_checkpoint(directory)
        names = [name for name in found.index if name.startswith("module/")]
        return {n.removeprefix("module/"): t for n, t in zip(names, found.tensors(names), strict=True)}


def read_seed(path: str | os.PathLike[str]) -> int:
    """The seed of the run that wrote a checkpoint. Reads no tensors."""
    directory = place(path)
    with errors(f"cannot read checkpoint {str(directory)!r}"):
        return int(_read_state(directory)["seed"])


def read_user(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the user's objects put into a checkpoint: ``hparams``, ``user``, ``datamodule``. Reads no tensors."""
    directory = place(path)
    with errors(f"cannot read checkpoint {str(directory)!r}"):
        plain = _read_state(directory)
        return {name: plain[name] for name in ("hparams", "user", "datamodule")}


def manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a checkpoint: format, versions, progress, plan, metrics, files. Reads nothing else."""
    return manifests.read(place(path))


def complete(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a checkpoint whose files are all there with the sizes that its manifest lists."""
    directory = place(path)
    try:
        manifests.check_files(directory, manifests.read(directory))
    except CheckpointError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- reading


def _fill(found: Contents, into: dict[str, Tensor], checks: Checks, before: Callable[[], object] | None = None) -> None:
    """Read tensors. DCP knows which part of a sharded one is this rank's; the others need no plan."""
    wanted, parts = Wanted(), {name: tensor for name, tensor in into.items() if sharded(tensor) is not None}
    for name in into.keys() - parts.keys():
        wanted.add_whole(name, found.index[name], into[name])
    wanted.read(found.directory / TENSORS, checks)
    if parts:
        from . import tensors as storage

        folder = found.directory / TENSORS
        storage.read(folder, storage.metadata(folder), parts, checks, before=before)


def _check_fits(index: dict[str, Entry], targets: dict[str, Tensor], prefixes: tuple[str, ...]) -> None:
    stored = {name: entry for name, entry in index.items() if name.startswith(prefixes)}
    wrong = [f"missing in the checkpoint: {_names(set(targets) - set(stored))}"] if set(targets) - set(stored) else []
    for prefix, where in (("module/", "not in the module"), ("beside/", "kept by a callback that this run has not")):
        if odd := {name for name in stored if name.startswith(prefix)} - set(targets):
            wrong.append(f"{where}: {_names(odd)}")
    for name in sorted(set(stored) & set(targets)):
        shape, dtype = stored[name].shape, getattr(torch, stored[name].dtype)
        target = targets[name]
        if shape != tuple(target.shape):
            wrong.append(f"{_names([name])} has shape {shape}, the module's has {tuple(target.shape)}")
        elif dtype.is_floating_point != target.dtype.is_floating_point:
            wrong.append(f"{_names([name])} is {dtype}, the module's is {target.dtype}")
    if wrong:
        raise CheckpointError(f"it does not fit the module: {'; '.join(wrong)}")


def _names(names: set[str] | list[str]) -> str:
    return ", ".join(repr(name.partition("/")[2]) for name in sorted(names))


def _read_state(directory: Place) -> dict[str, Any]:
    return read_state(directory, manifests.read(directory))


def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Give the tensors of each pair each other's values."""
    with torch.no_grad():
        for one, other in pairs:
            parts = [(one.detach(), other)]
            if one.is_cpu and all(type(t) is Tensor and t.is_contiguous() for t in parts[0]):
                # what is set aside stays in the processor's cache
                parts = list(zip(*(torch.split(t.view(-1), PART) for t in parts[0]), strict=True))
            for mine, its in parts:
                before = mine.clone()
                mine.copy_(its)
                its.copy_(before)


def _staging(index: dict[str, Entry], name: str, targets: dict[str, Tensor]) -> Tensor:
    shape, dtype = index[name].shape, getattr(torch, index[name].dtype)
    target = targets.get(name)
    if target is not None:
        # Sharded tensors are read in place: a model that is sharded for its size doesn't fit twice.
        in_place = sharded(target) is not None and dtype == target.dtype
        return target if in_place else torch.empty_like(target.detach())
    if name.startswith(("optimizer/", *SHARED)):
        parameter = name.split("/", 3)[3] if name.startswith(SHARED) else name.split("/", 2)[2].rpartition("/")[0]
        like = targets.get(f"module/{parameter}")
        if like is not None and sharded(like) is not None and shape == tuple(like.shape):
            return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(shape, dtype=dtype)


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
