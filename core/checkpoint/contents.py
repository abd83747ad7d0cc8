"""What is in a checkpoint, read without DCP and without a process group."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from . import manifest as manifests
from .files import Place
from .index import FILE, Entry, read_index
from .parts import AS_TENSORS, STATE, TENSORS
from .sums import Checks, Sum, difference

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Contents:
    """A checkpoint whose files are all there, with an index that fits them."""

    directory: Place
    manifest: dict[str, Any]
    index: dict[str, Entry]

    def tensors(self, names: Iterable[str]) -> list[Tensor]:
        """Tensors of these names, whole and on the CPU, of files that are as they were written."""
        names = list(names)
        with self.checked(names):
            return [self.tensor(name) for name in names]

    @contextmanager
    def checked(self, names: Iterable[str]) -> Iterator[None]:
        """Compare the files that hold these tensors with their checksums meanwhile; raises at the end."""
        with closing(Checks(self.directory, self.manifest["files"])) as checks:
            for file in sorted({chunk.file for name in names for chunk in self.index[name].chunks}):
                checks.begin(f"{TENSORS}/{file}")
            try:
                yield
            finally:
                checks.wait()  # a damaged file is what to say, not what became of it

    def tensor(self, name: str) -> Tensor:
        """One tensor, whole and on the CPU. Its file's checksum is not looked at."""
        import torch

        entry = self.index[name]
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) if len(entry.chunks) != 1 else None
        for chunk in entry.chunks:
            with (self.directory / TENSORS / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                data = file.read(chunk.length)
            part = load_plain(data, f"{TENSORS}/{chunk.file}")
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != chunk.sizes:
                raise CheckpointError(
                    f"{chunk.file} holds something else than the part of {name!r} that the index says"
                )
            if str(part.dtype) != f"torch.{entry.dtype}":
                raise CheckpointError(
                    f"{chunk.file} holds {part.dtype} for {name!r}, which the index calls {entry.dtype}"
                )
            if whole is None:
                return part
            whole[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        assert whole is not None
        return whole

    def state(self) -> dict[str, Any]:
        """The content of ``state.pt``, by the names of the fields of a `TrainState`."""
        return read_state(self.directory, self.manifest)


def open_checkpoint(directory: Place) -> Contents:
    """Read manifest and index, and check them and the files' sizes; raises `CheckpointError`."""
    values = manifests.read(directory)
    manifests.check_files(directory, values)
    for name in (STATE, f"{TENSORS}/{FILE}"):
        if name not in values["files"]:
            raise CheckpointError(f"its manifest does not list {name!r}")
    check_sum(directory, values, f"{TENSORS}/{FILE}", (directory / TENSORS / FILE).read_bytes())
    return Contents(directory, values, read_index(directory, values["files"]))


def check_sum(directory: Place, manifest: dict[str, Any], name: str, data: bytes) -> None:
    """Of a small file, which is read as a whole anyway."""
    stored = manifest["files"].get(name, {})
    found = Sum(size=len(data), crc32=zlib.crc32(data))
    if "crc32" in stored and (text := difference(name, stored, found)):
        raise CheckpointError(text)


def load_plain(data: bytes, name: str) -> Any:
    """What ``torch.save`` wrote, if it is plain data."""
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError, KeyError, ... on damaged files
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise CheckpointError(f"{name} cannot be loaded as plain data: {reason}") from error


def read_state(directory: Place, manifest: dict[str, Any]) -> dict[str, Any]:
    """``state.pt``, with each field of the type that it has in a `TrainState`."""
    from ..state import TrainState

    if not (directory / STATE).is_file():
        raise CheckpointError(f"{STATE} is missing")
    data = (directory / STATE).read_bytes()
    check_sum(directory, manifest, STATE, data)
    plain = load_plain(data, STATE)
    expected = {f.name for f in fields(TrainState)} - AS_TENSORS
    if not isinstance(plain, dict) or set(plain) != expected:
        found = sorted(map(str, plain)) if isinstance(plain, dict) else type(plain).__name__
        raise CheckpointError(f"{STATE} holds {found}, expected {sorted(expected)}")
    for name, value in plain.items():
        fits, what = _FORMS.get(name, (_is_dict, "a dict"))
        if not fits(value):
            raise CheckpointError(f"{STATE} holds {_short(value)} as {name!r}, expected {what}")
    if plain["progress"] != manifest["progress"]:
        raise CheckpointError(
            f"{STATE} holds the progress {plain['progress']!r}, and {manifests.NAME} says {manifest['progress']!r}"
        )
    return plain


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _are_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _are_optimizers(value: Any) -> bool:
    return _are_dicts(value) and all(
        _is_dict(one.get("state"))
        and all(_is_dict(values) for values in one["state"].values())
        and _are_dicts(one.get("groups"))
        and all(
            isinstance(group.get("params"), list) and all(isinstance(name, str) for name in group["params"])
            for group in one["groups"]
        )
        for one in value
    )


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizers": (_are_optimizers, "a list of dicts with state and groups"),
    "schedulers": (_are_dicts, "a list of dicts"),
    "host_noise": (_are_integers, "a list of integers"),
    "torch_noise": (_are_integers, "a list of integers"),
    "scaler": (lambda value: value is None or _is_dict(value), "a dict or None"),
    "seed": (lambda value: type(value) is int, "an integer"),
    "progress": (manifests.is_progress, "a dict of numbers that are not negative"),
    "callbacks": (lambda value: _is_dict(value) and all(map(_is_dict, value.values())), "a dict of dicts"),
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
