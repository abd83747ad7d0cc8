"""The weights of a checkpoint as one safetensors file, for plain PyTorch and for Hugging Face's models."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigurationError
from .contents import open_checkpoint
from .files import Place
from .parts import errors

_WEIGHTS = "module/"


@dataclass(frozen=True)
class Written:
    """How many tensors and bytes the file holds, and the names that were left out since they lack the prefix."""

    tensors: int
    size: int
    left_out: tuple[str, ...]


def consolidate(directory: Place, output: Path, *, dtype: torch.dtype | None = None, prefix: str = "") -> Written:
    """Write the module's tensors, whole, to ``output``.

    Every name of the module's ``state_dict`` is in the file, tied weights under each of their names, since a strict
    ``load_state_dict`` asks for all of them. ``prefix`` chooses the names that begin so and takes it off them, as
    ``"model."`` for the part ``self.model``. ``dtype`` converts floating-point tensors.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigurationError(
            "consolidate needs the package safetensors. Install it with: pip install 'trivet[safetensors]'"
        ) from error
    if output.exists():
        raise ConfigurationError(f"{str(output)!r} exists; choose another name or remove it")
    with errors(f"cannot read checkpoint {str(directory)!r}"):
        found = open_checkpoint(directory)
        names = {name.removeprefix(_WEIGHTS): name for name in found.index if name.startswith(_WEIGHTS)}
        chosen = {name.removeprefix(prefix): full for name, full in names.items() if name.startswith(prefix)}
        if not chosen:
            parts = ", ".join(sorted({repr(name.partition(".")[0] + ".") for name in names if "." in name}))
            raise ConfigurationError(f"no weight's name begins with {prefix!r}; they begin with {parts}")
        with found.checked(chosen.values()):
            tensors = {name: _converted(found.tensor(full), dtype) for name, full in chosen.items()}
    with errors(f"cannot write {str(output)!r}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})  # transformers reads no file without it
            os.replace(temporary, output)
        finally:
            temporary.unlink(missing_ok=True)
    left_out = tuple(name for name in names if not name.startswith(prefix))
    return Written(len(tensors), sum(tensor.nbytes for tensor in tensors.values()), left_out)


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def dtype_named(name: str) -> torch.dtype:
    """``"bf16"``, ``"bfloat16"`` and so on."""
    full = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}.get(name, name)
    dtype = getattr(torch, full, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"{name!r} is no floating-point dtype; try bfloat16, float16, float32 or float64")
    return dtype
