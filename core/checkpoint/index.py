"""Which tensors a checkpoint holds and where: DCP's metadata file, read without torch and without running anything.

DCP reads it with plain pickle, which a hostile file would use to run code. Here every class that belongs to the format
becomes an inert record, any other is an error, and what the records say is checked against the files before anything is
allocated or read.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from ..errors import CheckpointError
from .files import Place

FOLDER = "tensors"
FILE = ".metadata"

ITEMSIZE = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "complex128": 16,
}

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: where in the tensor, and where in which file of ``tensors/`` (a ``torch.save`` of it)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor: its dtype by torch's name, its shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def read_index(directory: Place, files: Mapping[str, Mapping[str, int]]) -> dict[str, Entry]:
    """The tensors of the checkpoint ``directory``, whose manifest lists ``files``; raises `CheckpointError`."""
    try:
        with (directory / FOLDER / FILE).open("rb") as file:
            found = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"its tensor index cannot be read: {type(error).__name__}: {error}") from error
    try:
        if type(found) is not _class("Metadata"):
            raise ValueError("it holds something else")
        places = {(key.values["fqn"], key.values.get("offset")): p.values for key, p in _pairs(found, "storage_data")}
        index = {name: _entry(name, record, places, files) for name, record in _pairs(found, "state_dict_metadata")}
    except CheckpointError:
        raise
    except Exception as error:  # records without the fields that belong to them
        raise CheckpointError(f"its tensor index is damaged: {type(error).__name__}: {error}") from error
    _check_files(index, files)
    return index


# ------------------------------------------------------------------------------------------------------------ checking


def _pairs(metadata: Any, name: str) -> list[tuple[Any, Any]]:
    return list(metadata.values[name].items())


def _entry(name: Any, record: Any, places: Mapping[Any, Any], files: Mapping[str, Mapping[str, int]]) -> Entry:
    def wrong(reason: str) -> CheckpointError:
        return CheckpointError(f"its tensor index is damaged: {name!r} {reason}")

    if type(name) is not str or type(record) is not _class("TensorStorageMetadata"):
        raise CheckpointError(f"its tensor index lists {name!r}, which is not a tensor")
    dtype, shape = record.values["properties"].values[0], record.values["size"]
    if not isinstance(dtype, _Dtype):
        raise wrong(f"has the dtype {dtype!r}, which is not read")
    if not _are_sizes(shape):
        raise wrong(f"has the shape {shape!r}")
    chunks = []
    for part in record.values["chunks"]:
        offsets, sizes = part.values["offsets"], part.values["sizes"]
        if not (_are_sizes(offsets) and _are_sizes(sizes) and len(offsets) == len(sizes) == len(shape)):
            raise wrong(f"has a part of {sizes!r} at {offsets!r}")
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise wrong(f"of shape {shape} has a part of {sizes} at {offsets}, which is outside of it")
        place = places.get((name, offsets)) or places.get((name, None))
        if place is None:
            raise wrong(f"has a part at {offsets} that lies in no file")
        if place.get("transform_descriptors"):
            raise wrong(f"is transformed by {place['transform_descriptors']!r}, which is not read")
        file, start, length = place["relative_path"], place["offset"], place["length"]
        if type(file) is not str or f"{FOLDER}/{file}" not in files:
            raise wrong(f"lies in the file {file!r}, which the manifest lacks")
        if not _are_sizes((start, length)) or start + length > files[f"{FOLDER}/{file}"]["size"]:
            raise wrong(f"lies at {start!r} with {length!r} bytes, outside of {file!r}")
        if prod(sizes) * ITEMSIZE[dtype] > length:
            raise wrong(f"has a part of {sizes} {dtype}, more than the {length} bytes that are there for it")
        chunks.append(Chunk(offsets, sizes, file, start, length))
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape) or _overlap(chunks):
        raise wrong(f"of shape {shape} is not made up of its {len(chunks)} parts")
    return Entry(str(dtype), shape, tuple(chunks))


def _are_sizes(values: Any) -> bool:
    return type(values) is tuple and len(values) <= 64 and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _overlap(chunks: list[Chunk]) -> bool:
    """Whether two chunks have an element in common."""
    full = [chunk for chunk in chunks if prod(chunk.sizes)]
    if len(full) < 2:
        return False
    dims = range(len(full[0].sizes))
    split = [d for d in dims if len({(chunk.offsets[d], chunk.sizes[d]) for chunk in full}) > 1]
    if len(split) == 1:  # as nearly always: then neighbours are enough
        full.sort(key=lambda chunk: chunk.offsets[split[0]])
        pairs = list(pairwise(full))
    else:
        pairs = [(a, b) for number, a in enumerate(full) for b in full[:number]]
    return any(
        all(a.offsets[d] < b.offsets[d] + b.sizes[d] and b.offsets[d] < a.offsets[d] + a.sizes[d] for d in dims)
        for a, b in pairs
    )


def _check_files(index: Mapping[str, Entry], files: Mapping[str, Mapping[str, int]]) -> None:
    held: Counter[str] = Counter()
    for entry in index.values():
        for chunk in entry.chunks:
            held[chunk.file] += chunk.length
    there = {name.removeprefix(f"{FOLDER}/"): e["size"] for name, e in files.items() if name.startswith(f"{FOLDER}/")}
    if odd := sorted(name for name, size in there.items() if size and name not in {*held, FILE}):
        raise CheckpointError(f"its tensor index knows nothing of the file {odd[0]!r}, which the manifest lists")
    for file, length in held.items():
        if length > there[file]:  # a byte that belongs to a thousand tensors would need a thousand times the memory
            raise CheckpointError(f"its tensor index wants {length} bytes of {file!r}, which has {there[file]}")


# ---------------------------------------------------------------------------------------------------------- unpickling


class _Record:
    """What stands for an object of DCP's: its state and nothing that acts."""

    values: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.values = state


class _Dtype(str):
    """The name of a dtype of torch."""

    __slots__ = ()


_CLASSES: dict[str, type[_Record]] = {}


def _class(name: str) -> type[_Record]:
    return _CLASSES.setdefault(name, type(name, (_Record,), {}))


def _no_layout(name: Any) -> None:
    """In the place of torch's layouts: all of these tensors are strided."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _class(name)
        if module == "torch" and name in ITEMSIZE:
            return _Dtype(name)
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _no_layout
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return _class("Path")  # where a checkpoint lay when another program wrote it
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not part of the format")
