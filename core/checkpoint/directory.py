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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import sharded
from ..state import TrainState
from . import manifest as manifests
from .contents import Contents, open_checkpoint, read_state
from .files import Place, place
from .parts import OPTIMIZER_TENSORS, RANKS, SHARED, TENSORS, errors
from .places import delete, sweep
from .sums import Checks
from .writing import write

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

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
        found, index = _open(directory)
        plain = found.state()
        targets: dict[str, Tensor] = {}
        if template is not None:
            targets = {f"module/{name}": tensor for name, tensor in template.module.items()}
            targets.update({f"beside/{name}": tensor for name, tensor in template.beside.items()})
            _check_fits(index, targets, ("module/", "beside/") if beside else ("module/",))
        others = ("beside/", "strategy/") if not beside else RANKS if rank is not None else ()
        mine = f"{RANKS}{rank}/" if beside else ()
        names = [name for name in index.state_dict_metadata if name.startswith(mine) or not name.startswith(others)]
        into = {name: _staging(index, name, targets) for name in names}
        in_place = {name: tensor for name, tensor in into.items() if tensor is targets.get(name)}
        optimizers = _join(plain.pop("optimizers"), into)
        from . import tensors as storage

        fresh = {name: tensor for name, tensor in into.items() if name not in in_place}
        with closing(Checks(directory, found.manifest["files"])) as checks:
            storage.read(directory / TENSORS, index, fresh, checks)
            # Read first, then copied: a damaged file is found before the first of the caller's tensors changes.
            if in_place:
                storage.read(directory / TENSORS, index, in_place, checks, before=before)
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


def _open(directory: Place) -> tuple[Contents, Metadata]:
    """A checkpoint, and its index as DCP wants it, in which our own reading of it found nothing wrong."""
    found = open_checkpoint(directory)
    from . import tensors as storage

    return found, storage.metadata(directory / TENSORS)


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


def _staging(index: Metadata, name: str, targets: dict[str, Tensor]) -> Tensor:
    from . import tensors as storage

    entry: Any = index.state_dict_metadata[name]
    target = targets.get(name)
    if target is not None:
        # Sharded tensors are read in place: a model that is sharded for its size doesn't fit twice.
        in_place = sharded(target) is not None and entry.properties.dtype == target.dtype
        return target if in_place else torch.empty_like(target.detach())
    if name.startswith(("optimizer/", *SHARED)):
        parameter = name.split("/", 3)[3] if name.startswith(SHARED) else name.split("/", 2)[2].rpartition("/")[0]
        like = targets.get(f"module/{parameter}")
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
