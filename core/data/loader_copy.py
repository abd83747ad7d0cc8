"""The one place where a user's DataLoader is copied (docs/decisions/0003-loader-copy.md)."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader


def copy_loader(loader: DataLoader[Any], **replaced: Any) -> DataLoader[Any]:
    """A shallow copy of a loader in which the attributes ``replaced`` have other values.

    Class, constructor arguments and the user's own attributes stay; no constructor runs. The loader itself is not
    changed, and neither are its workers: the copy starts its own.
    """
    twin = copy.copy(loader)
    # __dict__, because torch refuses to assign batch_sampler, sampler or dataset once a loader is initialised.
    # A loader with persistent workers keeps its running iterator here; shared, it would read by the old batch sampler.
    vars(twin).update({"_iterator": None, **replaced})
    return twin
