"""Small functions that users of Lightning import from its utilities."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning_utilities.core import rank_zero as ranks
from torch import nn

from ...callbacks.callback import Callback
from ...data.datamodule import DataModule
from ...hooks import overrides
from ...hparams import HParams
from ...launch import environments
from ...launch.world import LAUNCH_DIR
from ...loggers.logger import NOTHING
from ...module import Module


def _rank() -> int:
    if os.environ.get(LAUNCH_DIR):
        return int(os.environ["RANK"])
    world = environments.detect()
    return 0 if world is None else world.rank


rank_zero_only: Any = ranks.rank_zero_only
rank_zero_only.rank = _rank()  # what these functions ask; it does not change while a process lives
rank_zero_info, rank_zero_warn, rank_zero_debug = ranks.rank_zero_info, ranks.rank_zero_warn, ranks.rank_zero_debug
rank_zero_deprecation = ranks.rank_zero_deprecation


def rank_zero_experiment(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a logger's ``experiment``: on other ranks than 0 an object that takes every call and does nothing."""

    @wraps(function)
    def experiment(self: Any) -> Any:
        return function(self) if rank_zero_only.rank == 0 else NOTHING

    return experiment


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """The norm of each parameter's gradient, and of all of them together."""
    power = float(norm_type)
    grads = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    norms = {f"grad_{norm_type}_norm{group_separator}{name}": grad.norm(power) for name, grad in grads.items()}
    if norms:
        total = torch.stack(list(norms.values())).norm(power)
        norms[f"grad_{norm_type}_norm_total"] = total
    return norms


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """A context after which Python's, numpy's and torch's generators are as before."""
    import numpy

    python, other = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(enabled=True, devices=None if include_cuda else []):
        yield
    random.setstate(python)
    numpy.random.set_state(other)


def is_overridden(method_name: str, instance: object, parent: type | None = None) -> bool:
    """Whether an object has its own version of a method of the class that it derives from."""
    bases: tuple[type, ...] = (Module, DataModule, Callback) if parent is None else (parent,)
    return any(isinstance(instance, base) and overrides(instance, base, method_name) for base in bases)


class AttributeDict(HParams):
    """A mapping whose items are attributes too."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(**dict(*args, **values))
