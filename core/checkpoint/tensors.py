"""The tensors of a checkpoint, through `torch.distributed.checkpoint` (DCP).

Imported when a checkpoint is written or read: a run without checkpoints does not pay for importing DCP.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import CheckpointError
from .files import Place
from .reader import Part, Wanted
from .sums import Checks, Sum, Summing, read_sum

Finish = Callable[[dict[str, Sum]], None]
ALL = "all"  # one entry for DCP, which makes a record of each before it begins: a second for 10,000
# warnings of DCP: where there is one process; in torch 2.9
ALONE, STORAGE = "torch.distributed is disabled, unavailable or uninitialized", "TypedStorage is deprecated"

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


def write(
    directory: Place, tensors: Mapping[str, Tensor], *, distributed: bool, finish: Finish = lambda sums: None
) -> None:
    """Write ``tensors``, plain or `DTensor`, under their names. With ``distributed`` a collective: all ranks call it.

    A tensor that several ranks hold is written once, by the lowest of them: buffers of a replicated module differ
    between ranks, and rank 0's are the ones that training goes on with. ``finish`` is called on rank 0 when all have
    written, with the size and checksum of each file, as the rank that wrote it counted them. Raises `CheckpointError`
    on all ranks if anything failed on any, ``finish`` included.
    """
    writer = Writer(directory, finish)
    _run(lambda: save({ALL: tensors}, storage_writer=writer, planner=Planner(), no_dist=not distributed))


def metadata(directory: Place) -> Metadata:
    """Which tensors the directory holds, without reading them. Raises `CheckpointError` if it is no DCP metadata."""
    try:
        with (directory / ".metadata").open("rb") as file:
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


def read(
    directory: Place,
    index: Metadata,
    into: dict[str, Tensor],
    checks: Checks,
    *,
    before: Callable[[], object] | None = None,
) -> None:
    """Fill the tensors ``into`` in place, of a `DTensor` this rank's part. No collective: ranks read for themselves.

    The files that are read from are compared with their checksums meanwhile or, with ``before``, first: that is called
    when they are found to be what was written, and nothing has changed yet.
    """
    state: dict[str, Any] = dict(into)
    reader = _Reader(directory, index, checks, before)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _run(lambda: load(state, storage_reader=reader, planner=planner, no_dist=True))


def _run(function: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"{ALONE}|{STORAGE}")
        try:
            function()
        except BaseException as error:
            if (reason := told(error)) is error:
                raise
            raise reason from error


def told(error: BaseException) -> BaseException:
    """What DCP raised, as a `CheckpointError` with the reason; an interrupt as itself."""
    if not isinstance(error, CheckpointException):  # which is a BaseException, raised by DCP on all ranks
        return CheckpointError(_reason(error)) if isinstance(error, Exception) else error
    causes = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
    interrupts = [cause for cause in causes.values() if not isinstance(cause, Exception)]
    if interrupts:
        return interrupts[0]
    reasons = [f"rank {rank}: {_reason(cause)}" for rank, cause in causes.items()]
    return CheckpointError(_reason(causes[0]) if set(causes) == {0} else "; ".join(reasons))


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class Planner(DefaultSavePlanner):
    """DCP's planner of the dict of tensors that stands under `ALL`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[ALL], storage_meta, is_coordinator)


@dataclass(frozen=True)
class _Summed(WriteResult):
    """A result that takes the sums of this rank's files along to rank 0."""

    sums: dict[str, Sum]


class _Files(FileSystem):
    """DCP's files at places of either kind, each summed while it is written."""

    def __init__(self) -> None:
        self.sums: dict[str, Sum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as file:
            if mode != "wb":
                yield file
                return
            summing = Summing(file, archives=True)
            yield summing
        self.sums[path.name] = summing.sum or read_sum(path)

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)
        self.sums[new_path.name] = self.sums.pop(path.name)

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        path.unlink()


class Writer(FileSystemWriter):
    """DCP's writer with one thread: with more, DCP loses the exceptions of all but the first and reports success."""

    def __init__(self, path: Place, finish: Finish, **options: Any) -> None:
        super().__init__(path, thread_count=1, sync_files=isinstance(path, Path), **options)
        self.fs = self._files = _Files()
        self.path = cast("Any", path)  # DCP takes a `Remote` for a path of this machine
        self._finish = finish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with _pickles():
            results = super().write_data(plan, planner).wait()
        if results:
            first = results[0]
            results[0] = _Summed(first.index, first.size_in_bytes, first.storage_data, dict(self._files.sums))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, with the results of all."""
        sums = self._files.sums
        for result in chain.from_iterable(results):
            if isinstance(result, _Summed):
                sums.update(result.sums)
        with _pickles():
            super().finish(metadata, results)
            self._finish(sums)

    def storage_meta(self) -> StorageMeta | None:
        return None  # it would record the path of the temporary directory


@contextmanager
def _pickles() -> Iterator[None]:
    """DCP sends an exception to all ranks by pickle; one that doesn't pickle would leave them waiting."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(_reason(error)) from None


class _Reader(FileSystemReader):
    """DCP's reader with an index that has been checked, and of files that are checked; see `read`."""

    def __init__(self, path: Place, index: Metadata, checks: Checks, before: Callable[[], object] | None) -> None:
        super().__init__("")
        self.folder, self.index, self.checks, self.before = path, index, checks, before

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted = Wanted()
        for item in plan.items:
            place = self.index.storage_data[item.storage_index]
            entry: Any = self.index.state_dict_metadata[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            part = Part(item.dest_index.fqn, tuple(item.storage_offsets), tuple(item.lengths), target)
            wanted.add(place.relative_path, place.offset, place.length, entry.properties.dtype, part)
        if self.before is not None:
            wanted.check(self.folder, self.checks)
            self.before()
        wanted.read(self.folder, self.checks)
        done: Future[None] = Future()
        done.set_result(None)
        return done

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
