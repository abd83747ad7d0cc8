"""What two checkpoints differ in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .contents import Contents, open_checkpoint
from .files import Place
from .parts import errors

_FIELDS = ("progress", "hparams", "optimizers", "schedulers", "seed")
_CLOCK = {"seconds"}  # of progress: no two runs agree in it


def compare(one: Place, other: Place) -> list[tuple[str, str]]:
    """The differences as pairs of what and how, tensors first; an empty list where there are none."""
    contents = []
    for path in (one, other):
        with errors(f"cannot read checkpoint {str(path)!r}"):
            contents.append(open_checkpoint(path))
    a, b = contents
    with errors("cannot compare"), a.checked(a.index), b.checked(b.index):
        found = list(_tensors(a, b))
    states = []
    for each in (a, b):
        with errors(f"cannot read checkpoint {str(each.directory)!r}"):
            states.append(each.state())
    for name in _FIELDS:
        found += _plain(states[0][name], states[1][name], name)
    return found


def _tensors(a: Contents, b: Contents) -> Iterator[tuple[str, str]]:
    for name in sorted(a.index.keys() | b.index.keys()):
        x, y = a.index.get(name), b.index.get(name)
        if x is None or y is None:
            yield name, f"only in {'A' if y is None else 'B'}"
        elif x.shape != y.shape:
            yield name, f"shape {x.shape} | {y.shape}"
        else:
            how = [f"{x.dtype} | {y.dtype}"] if x.dtype != y.dtype else []
            if (largest := _largest(a.tensor(name), b.tensor(name))) is not None:
                how.append(f"largest difference {largest:.3g}")
            if how:
                yield name, ", ".join(how)


def _largest(x: Tensor, y: Tensor) -> float | None:
    """The largest absolute difference; None where all values are the same, NaN being the same as NaN."""
    if x.dtype == y.dtype and torch.equal(x, y):
        return None
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    differs = (x != y) & ~(x.isnan() & y.isnan())
    return float((x - y)[differs].abs().max()) if differs.any() else None


def _plain(a: Any, b: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys(), key=str):
            inner = f"{where}.{key}"
            if where == "progress" and key in _CLOCK:
                continue
            if key not in a or key not in b:
                yield inner, f"only in {'A' if key in a else 'B'}"
            else:
                yield from _plain(a[key], b[key], inner)
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _plain(x, y, f"{where}[{number}]")
    elif isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or _largest(a, b) is not None:
            yield where, "differs"
    elif a != b and not (a != a and b != b):
        yield where, f"{_short(a)} | {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
