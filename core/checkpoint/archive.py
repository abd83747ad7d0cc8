"""Where in a file the elements of a tensor lie: what `torch.save` wrote, looked into without reading it."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import IO, Any

from .index import ITEMSIZE

_STORAGES = {
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
}
_LOCAL = struct.Struct("<4s22xHH")  # of an entry's header: mark, lengths of what stands between it and the bytes


@dataclass(frozen=True)
class Elements:
    """Elements of the shape ``shape``, one behind the other, from byte ``start`` of the file on."""

    start: int
    shape: tuple[int, ...]


def elements(file: IO[bytes], start: int, length: int, dtype: str) -> Elements | None:
    """Of the archive of one tensor in those bytes of ``file``; None unless it is contiguous, of this dtype, and nothing
    is odd about it: then `torch.load` is to say what it is."""
    try:
        with zipfile.ZipFile(_Window(file, start, length)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            found, order, data = entries["data.pkl"], entries["byteorder"], entries["data/0"]
            if any(entry.compress_type for entry in (found, order, data)) or found.file_size > 1 << 14:
                return None
            if archive.read(order) != sys.byteorder.encode():
                return None
            storage, offset, shape, strides = _LayoutUnpickler(io.BytesIO(archive.read(found))).load()
        file.seek(start + data.header_offset)
        mark, name, extra = _LOCAL.unpack(file.read(_LOCAL.size))
        begin, size = data.header_offset + _LOCAL.size + name + extra, prod(shape) * ITEMSIZE[dtype]
        plain = [1, *accumulate(shape[:0:-1], mul)][::-1] if shape else []
        fits = (mark, data.file_size, begin + size <= length) == (b"PK\3\4", size, True)
        fits = fits and (_STORAGES.get(storage[1]), storage[2], offset, list(strides)) == (dtype, "0", 0, plain)
    except Exception:  # of damaged bytes nearly anything
        return None
    return Elements(start + begin, tuple(shape)) if fits else None


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(rest if size is None or size < 0 else min(size, rest))
        self._at += len(data)
        return data


class _LayoutUnpickler(pickle.Unpickler):
    """Of ``data.pkl``: the storage's record, offset, shape and strides. Nothing is run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _layout(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Any:
    return storage, offset, shape, strides
