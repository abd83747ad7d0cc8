"""One process that holds everything and talks to nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from trivet.hooks import overrides
from trivet.plugins import Context, MicroBatch, Needs, Strategy


class Single(Strategy):
    """One process, one device. The reference that every other strategy must equal."""

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def offers(self) -> frozenset[str]:
        return (super().offers - {"several_processes"}) | {"lazy_devices"}

    def mesh_dims(self, world_size: int) -> dict[str, int]:
        return {"dp": 1}

    user: nn.Module | None = None  # whose step is called as it is
    direct: Callable[[Tensor], None] | None = None  # backward of a plain loss, where no subclass has a part in it

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        self.context = context
        self.user = root.get_submodule("module") if getattr(root, "plain", False) else None
        own = overrides(self, Strategy, "loss_of") or overrides(self, Strategy, "backward")
        self.direct = None if own else context.backward
        return root

    def forward_backward(self, root: nn.Module, batches: Iterable[MicroBatch], scale: float | None) -> None:
        for micro in batches:  # nothing to hold back until the last
            self.one_batch(root, micro, scale)

    def one_batch(self, root: nn.Module, micro: MicroBatch, scale: float | None) -> None:
        """Calls the step past ``nn.Module.__call__``, which is there for hooks (nobody has one on it), and the user's
        own where there is nothing to do around it."""
        user: Any = self.user
        if user is None:
            micro.output = output = root.forward("training_step", micro.batch, micro.index)
        else:
            micro.output = output = user.training_step(micro.batch, micro.index)
        if self.context.manual:
            return
        direct = self.direct
        if direct and scale is None and micro.weight is None and isinstance(output, Tensor):
            direct(output)
        elif (loss := self.loss_of(micro, scale)) is not None:
            self.backward(root, loss)

    def reduce_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Nothing to average."""

    def agree_(self, flag: Tensor) -> Tensor:
        return flag

    def refresh(self, root: nn.Module) -> nn.Module:
        return root  # nobody to differ from
