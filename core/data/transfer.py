"""How a batch gets to the device: the user's hooks on the way, and the device's own way of moving."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..engine import Engine
    from .window import Ahead, Window

Transfer = Callable[[Any, int], Any]  # (batch, number of its loader) -> batch


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with every tensor in its lists, tuples, dicts and dataclasses moved to the device."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(device, non_blocking=True))


class Coming:
    """Stands for a batch in `MicroBatch.batch` while it is copied to the device, beside the update before it.

    Made by `ahead`, replaced by the batch in its turn by `Plain`. ``given``, which `Accelerator.ahead` returned, is
    called once then, by the thread that trains, and returns the batch on the device.
    """

    __slots__ = ("given",)

    def __init__(self, given: Callable[[], Any]) -> None:
        self.given = given


def ahead(engine: Engine, transfer: Transfer | None) -> Ahead | None:
    """What begins to move the first batch of the window after the one that is worked on. None where batches are moved
    in their turn: on most devices, and where a user's hook has a part in it."""
    begin, device = engine.accelerator.ahead, engine.device
    if begin is None or not isinstance(transfer, Plain):
        return None

    def send(window: Window) -> None:
        first = window.batches[0]
        first.batch = Coming(begin(first.batch, device))

    return send


class Plain:
    """The `Transfer` of a run in which no hook of the user's has a part: batches are moved by the accelerator alone.

    Only here may a batch be moved before its turn, since nobody sees it on the way; a `Coming` is what `ahead` left.
    """

    def __init__(self, engine: Engine) -> None:
        self.move = engine.move

    def __call__(self, batch: Any, loader: int) -> Any:
        return batch.given() if type(batch) is Coming else self.move(batch)


def transfer(engine: Engine, own: Callable[[str], Callable[..., Any] | None]) -> Transfer | None:
    """What is done to each batch; None where it stays where it is and nobody overrides a hook.

    ``own(name)`` is the data module's override of a hook, else the module's, else None.
    """
    before, after = own("on_before_batch_transfer"), own("on_after_batch_transfer")
    move = own("transfer_batch_to_device")
    if before is after is move is None:
        return Plain(engine) if engine.moves else None

    def run(batch: Any, loader: int) -> Any:
        if before is not None:
            batch = before(batch, loader)
        batch = engine.move(batch) if move is None else move(batch, engine.device, loader)
        return batch if after is None else after(batch, loader)

    return run
