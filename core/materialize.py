"""From a module on the meta device to one with memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .errors import ConfigurationError

ALIGNED = 64  # bytes


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


class Scratch:
    """Memory that one unit after the other is materialised in.

    Taking and freeing large blocks by turns with the smaller ones that stay leaves holes, which the C library's
    allocator does not give back: the process grows to the size of the whole model.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, like: list[nn.Parameter]) -> list[Tensor]:
        """Tensors of these shapes and dtypes, in the same memory as those of the last call."""
        sizes = [-(-p.numel() * p.element_size() // ALIGNED) * ALIGNED for p in like]
        if sum(sizes) > self.memory.numel():
            device, self.memory = self.memory.device, torch.empty(0, dtype=torch.uint8)  # free it before
            self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = torch.split(self.memory[: sum(sizes)], sizes)
        used = [part[: p.numel() * p.element_size()] for p, part in zip(like, parts, strict=True)]
        return [part.view(p.dtype).view(p.shape) for p, part in zip(like, used, strict=True)]


def materialize_(module: nn.Module, device: torch.device, scratch: Scratch | None = None) -> list[nn.Parameter]:
    """Give tensors on the meta device memory, and values by their owners' ``reset_parameters()``. Ties are kept.

    Returns the new parameters. They are in ``scratch``, where given, and have to be copied before it is used again.
    """
    lacking = list(dict.fromkeys(param for param in module.parameters() if param.is_meta))
    tensors = scratch.take(lacking) if scratch else [torch.empty_like(param, device=device) for param in lacking]
    made = {p: nn.Parameter(tensor, p.requires_grad) for p, tensor in zip(lacking, tensors, strict=True)}
    for part in module.modules():
        direct = list(_direct(part))
        for name, tensor in direct:
            new = made[tensor] if isinstance(tensor, nn.Parameter) else torch.empty_like(tensor, device=device)
            setattr(part, name, new)
        reset = getattr(part, "reset_parameters", None)
        if direct and callable(reset):
            with torch.no_grad():
                reset()
    return list(made.values())


def move(module: nn.Module, device: torch.device) -> nn.Module:
    """``module.to(device)``. Where a device cannot take over a parameter (XLA) torch makes a new one for each place, so
    that ties would come apart: they are made again."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, param in part.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(param, []).append((part, name))
    module = module.to(device)
    for (first, its_name), *others in places.values():
        for part, name in others:
            setattr(part, name, getattr(first, its_name))
    return module


def place_(module: nn.Module, device: torch.device) -> None:
    """Move what is not on the meta device."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)


def _direct(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, p) for name, p in part.named_parameters(recurse=False) if p.is_meta)
    yield from ((name, b) for name, b in part.named_buffers(recurse=False) if b.is_meta)
