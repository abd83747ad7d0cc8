"""Ranks that train apart for some updates: when they meet, how they are averaged, and how a checkpoint holds each."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from trivet import gradients
from trivet.plugins import Context, OwnState

CHUNK_BYTES = 25 * 2**20  # of one collective: memory for a copy of so much, not of the model


class Replicas:
    """What a strategy keeps whose ranks meet every ``period`` updates. Every rank makes one, with the same module."""

    def __init__(self, root: nn.Module, context: Context, period: int) -> None:
        self.root, self.context, self.period = root, context, period
        self.several = context.world.world_size > 1
        self.updates = 0
        self.met = 0  # the update after which ranks were last made alike
        self.optimizers: list[Optimizer] = []
        self.trained = {param for param in root.parameters() if param.requires_grad}  # since ranks met

    def count(self) -> bool:
        """Count an update, which all ranks made; whether the ranks meet now."""
        self.updates += 1
        return self.several and self.updates % self.period == 0

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by the user's names."""
        return {name.removeprefix("module."): param for name, param in self.root.named_parameters()}

    def tensors(self) -> dict[str, Tensor]:
        """What training has changed since ranks met: parameters that were trained, and buffers, by the user's names."""
        found = {name: p.detach() for name, p in self.parameters().items() if p.requires_grad or p in self.trained}
        return found | {name.removeprefix("module."): buffer for name, buffer in self.root.named_buffers()}

    @torch.no_grad()
    def average_(self) -> None:
        """Give all ranks the mean of what training has changed. All ranks call it."""
        if self.several:
            for chunk in _chunks(tensor for tensor in self.tensors().values() if tensor.is_floating_point()):
                flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
                dist.all_reduce(flat)  # all ranks
                flat /= self.context.world.world_size  # after the sum: what was alike stays as it is
                for tensor, part in zip(chunk, torch.split(flat, [t.numel() for t in chunk]), strict=True):
                    tensor.copy_(part.view_as(tensor))
        self.met, self.trained = self.updates, {param for param in self.root.parameters() if param.requires_grad}

    # ------------------------------------------------------------------------------------------------- checkpoints

    def state(self) -> OwnState:
        """The counters, and of each rank: the state of its optimizers, and its weights where ranks are not alike."""
        alike = {"updates": torch.tensor(self.updates), "met": torch.tensor(self.met)}
        if not self.several:
            return OwnState(alike)
        apart = {
            f"tensors/{name}": tensor
            for name, tensor in self.tensors().items()
            if self.met != self.updates or not tensor.is_floating_point()  # which are never averaged
        }
        for number, optimizer in enumerate(self.optimizers):
            for name, param in self._names(optimizer).items():
                for key, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        apart[f"optimizers/{number}/{name}/{key}"] = value
        return OwnState(alike, apart)

    def _names(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Its parameters, each by the user's name; one that the module does not own by its place."""
        names = {param: name for name, param in self.parameters().items()}
        return {names.get(p, f"<{place}>"): p for place, p in enumerate(gradients.parameters([optimizer]))}

    @torch.no_grad()
    def load(self, state: OwnState, name: str) -> bool:
        """The reverse of `state`; whether there was any, of a strategy whose ranks train apart."""
        if "updates" not in state.alike:
            return False
        self.updates, self.met = int(state.alike["updates"]), int(state.alike["met"])
        here = self.context.world.world_size
        if state.world_size != here:
            warnings.warn(
                f"{name}: the checkpoint holds weights and optimizer state of {state.world_size} ranks, and there are "
                f"{here}: all go on with those of its rank 0.",
                stacklevel=2,
            )
            return True
        if not self.several:
            return True
        buffers = {name.removeprefix("module."): buffer for name, buffer in self.root.named_buffers()}
        tensors: dict[str, Tensor] = {**self.parameters(), **buffers}
        optimizers: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, value in state.apart.items():
            kind, _, rest = key.partition("/")
            if kind == "tensors":
                tensors[rest].copy_(value)
            else:
                number, _, rest = rest.partition("/")
                param, _, entry = rest.rpartition("/")
                optimizers.setdefault((number, param), {})[entry] = value
        for place, optimizer in enumerate(self.optimizers):
            for param_name, owned in self._names(optimizer).items():
                _exchange(optimizer, owned, optimizers.get((str(place), param_name), {}))
        return True


def _exchange(optimizer: Optimizer, param: nn.Parameter, mine: dict[str, Tensor]) -> None:
    """Put this rank's tensors in the place of rank 0's, which the core has read into the optimizer."""
    theirs: dict[str, Any] = optimizer.state.pop(param, {})
    kept = {key: value for key, value in theirs.items() if not isinstance(value, Tensor)}
    for key, value in mine.items():
        like = theirs.get(key, param if value.dim() else value)  # torch keeps the scalar `step` on the host
        kept[key] = value.to(like.device)
    if kept and (mine or len(kept) == len(theirs)):
        optimizer.state[param] = kept


def _chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of one dtype and of about `CHUNK_BYTES`."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for members in by_dtype.values():
        chunk: list[Tensor] = []
        for tensor in members:
            if chunk and sum(one.nbytes for one in chunk) + tensor.nbytes > CHUNK_BYTES:
                yield chunk
                chunk = []
            chunk.append(tensor)
        yield chunk
