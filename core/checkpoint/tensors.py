"""The tensors of a checkpoint, through `torch.distributed.checkpoint` (DCP). The only module that imports it.

Imported when a checkpoint is written or read: a run without checkpoints does not pay for importing DCP.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import CheckpointError

# What DCP pickles into its metadata file. It reads it back with plain pickle, which would run anything: we don't.
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}


def write(directory: Path, tensors: Mapping[str, Tensor], *, distributed: bool) -> None:
    """Write ``tensors``, plain or `DTensor`, under their names. With ``distributed`` a collective: all ranks call it.

    A tensor that several ranks hold is written once, by the lowest of them: buffers of a replicated module differ
    between ranks, and rank 0's are the ones that training goes on with. Raises `CheckpointError` on all ranks if it
    failed on any.
    """
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    _run(lambda: save(dict(tensors), storage_writer=_Writer(directory), planner=planner, no_dist=not distributed))


def metadata(directory: Path) -> Metadata:
    """Which tensors the directory holds, without reading them. Raises `CheckpointError` if it is no DCP metadata."""
    try:
        with open(directory / ".metadata", "rb") as file:
            found = _MetadataUnpickler(file).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"its tensor index cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"its tensor index is a {type(found).__name__}, not torch.distributed.checkpoint's Metadata"
        )
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"its tensor index lists {name!r}, which is not a tensor")
    return found


def files(index: Metadata) -> dict[str, int]:
    """The data files that the index refers to, each with the least size that it must have."""
    sizes: dict[str, int] = {}
    for place in index.storage_data.values():
        if place.transform_descriptors:
            raise CheckpointError(f"its tensors are transformed by {place.transform_descriptors!r}, which is not read")
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def empty(index: Metadata, name: str) -> Tensor:
    """A plain CPU tensor of the shape and dtype that the index says ``name`` has."""
    entry = index.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def read(directory: Path, index: Metadata, into: dict[str, Tensor]) -> None:
    """Fill the tensors ``into`` in place, of a `DTensor` this rank's part. No collective: ranks read for themselves."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: dict[str, Any] = dict(into)
    _run(lambda: load(state, storage_reader=_Reader(directory, index), planner=planner, no_dist=True))


def _run(function: Callable[[], object]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            function()
    except CheckpointException as error:  # a BaseException, raised by DCP on all ranks
        reasons = [f"rank {rank}: {_reason(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
        raise CheckpointError(reasons[0][len("rank 0: ") :] if _alone(error) else "; ".join(reasons)) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(_reason(error)) from error


def _alone(error: CheckpointException) -> bool:
    return set(error.failures) == {0}


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class _Writer(FileSystemWriter):
    """DCP's writer with one thread: with more, DCP loses the exceptions of all but the first and reports success."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, thread_count=1, sync_files=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # DCP sends the exception to rank 0 by pickle; one that doesn't pickle would leave the ranks waiting.
            raise CheckpointError(f"{type(error).__name__}: {error}") from None

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would record the path of the temporary directory


class _Reader(FileSystemReader):
    """DCP's reader with an index that has been checked."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not part of the format")
