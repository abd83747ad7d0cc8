"""Checkpoints of other programs, or that only one strategy reads, made into checkpoints that any strategy reads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import CheckpointError, ConfigurationError
from ..state import TrainState
from . import directory as storage
from . import manifest as manifests
from .files import Place, Remote
from .parts import errors


@dataclass(frozen=True)
class Report:
    """What was read, what of it is in the new checkpoint, and what has no counterpart or could not be told."""

    what: str
    taken: tuple[str, ...]
    left: tuple[str, ...]


def convert(source: Place, output: Place, *, model: str | None = None, allow: Sequence[str] = ()) -> Report:
    """Read ``source``, a checkpoint of strategy deepspeed or a Lightning file, and write the checkpoint ``output``.

    ``model``: the import path of the module's class, for a Lightning file. ``allow``: import paths of classes that such
    a file may unpickle. Raises `CheckpointError` where ``source`` is something else or damaged.
    """
    if isinstance(source, Remote):
        raise CheckpointError(f"{str(source)!r} is not on this machine; copy it here first")
    if not source.exists():
        raise CheckpointError(f"{str(source)!r} does not exist")
    if output.exists():
        raise ConfigurationError(f"{str(output)!r} exists; choose another name or remove it")
    with errors(f"cannot read checkpoint {str(source)!r}"):
        if source.is_file():
            from .convert_lightning import read_lightning

            with allowed(allow):
                state, report = read_lightning(source, model)
        elif (source / manifests.NAME).is_file():
            from .convert_deepspeed import read_deepspeed

            state, report = read_deepspeed(source)
        else:
            raise CheckpointError(
                f"it has no {manifests.NAME} and is no file; Lightning's sharded checkpoints have to be made one file "
                "first: python -m lightning.pytorch.utilities.consolidate_checkpoint DIR"
            )
    write(output, state)
    return report


def write(output: Place, state: TrainState) -> None:
    """As a process that is alone."""
    storage.write(output, state, rank=0, world_size=1)


@contextmanager
def allowed(names: Sequence[str]) -> Iterator[None]:
    """Let torch unpickle these classes inside the block."""
    with torch.serialization.safe_globals([imported(name) for name in names]):
        yield


def imported(path: str) -> Any:
    """What ``package.module.Name`` names."""
    where, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{path!r} cannot be imported: {error}") from error
