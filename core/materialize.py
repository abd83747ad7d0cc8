"""From a module on the meta device to one with memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .errors import ConfigurationError


def check(module: nn.Module, restored: bool) -> None:
    """Raise ConfigurationError naming every tensor on the meta device that nothing would give its values."""
    lacking = []
    for prefix, part in module.named_modules():
        if callable(getattr(part, "reset_parameters", None)):
            continue
        stored = set(part.state_dict()) if restored else set()  # a checkpoint gives these
        lacking += [f"{prefix}.{name}".lstrip(".") for name, tensor in _direct(part) if name not in stored]
    if lacking:
        raise ConfigurationError(
            f"these tensors were built on the meta device, and no reset_parameters() gives them values: "
            f"{', '.join(lacking)}. Define reset_parameters() in the modules that own them, or start from a checkpoint."
        )


def materialize_(module: nn.Module, device: torch.device) -> None:
    """Give tensors on the meta device memory, and values by their owners' ``reset_parameters()``. Ties are kept."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        direct = list(_direct(part))
        for name, tensor in direct:
            if isinstance(tensor, nn.Parameter):
                if tensor not in made:
                    made[tensor] = nn.Parameter(torch.empty_like(tensor, device=device), tensor.requires_grad)
                setattr(part, name, made[tensor])
            else:
                setattr(part, name, torch.empty_like(tensor, device=device))
        reset = getattr(part, "reset_parameters", None)
        if direct and callable(reset):
            with torch.no_grad():
                reset()


def place_(module: nn.Module, device: torch.device) -> None:
    """Move what is not on the meta device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)


def _direct(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p) for name, p in part.named_parameters(recurse=False) if p.is_meta)
    yield from ((name, b) for name, b in part.named_buffers(recurse=False) if b.is_meta)
