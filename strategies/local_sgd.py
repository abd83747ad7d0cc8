"""Local SGD and DiLoCo: every rank steps by itself, and ranks meet every few updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer
from trivet.errors import ConfigurationError
from trivet.plugins import Clip, Context, OwnState, StepResult, Strategy
from trivet.scaling import LossScaler
from trivet.strategies.outer import Outer
from trivet.strategies.replicas import Replicas


class LocalSGD(Strategy):
    """Ranks clip and step apart, and average parameters and buffers every ``period`` updates (Stich 2019).

    With ``outer_lr`` the way to the average is the gradient of an outer step (DiLoCo, Douillard et al. 2023), for which
    every rank keeps two more copies of the trained parameters, in float32 at least.

    One process trains like `single`. Between two averages ranks hold different weights: a checkpoint holds rank 0's for
    everybody and each rank's for this strategy, and validation sees each rank's. The end of a fit averages.

    Args:
        period: updates from one average to the next.
        outer_lr: learning rate of the outer step; None for the average itself.
        outer_momentum: Nesterov momentum of the outer step.
    """

    def __init__(self, period: int = 8, outer_lr: float | None = None, outer_momentum: float = 0.0) -> None:
        self.name = "local-sgd" if outer_lr is None else "diloco"
        if period < 1:
            raise ConfigurationError(f"{self.name}: period={period!r} must be at least 1.")
        if outer_lr is not None and not outer_lr > 0:
            raise ConfigurationError(f"{self.name}: outer_lr={outer_lr!r} must be positive.")
        if not 0 <= outer_momentum < 1:
            raise ConfigurationError(f"{self.name}: outer_momentum={outer_momentum!r} must be at least 0 and below 1.")
        self.period, self.outer_lr, self.outer_momentum = period, outer_lr, outer_momentum
        self.synchronises_every = period

    @property
    def offers(self) -> frozenset[str]:
        return super().offers - {"manual_optimization", "skip_samples"}  # a step is an update, on all ranks

    def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
        if world_size == 1:
            return (f"{self.name} with one process: nobody is met, it trains like single",)
        return (
            f"{self.name}: {world_size} ranks clip and step apart, and meet every {self.period} updates; in between, "
            "validation sees each rank's weights, and others read rank 0's in a checkpoint",
        )

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        root = super().shard(root, context)  # all begin with rank 0's values
        self.context = context  # in which the default has set ``late``, to reduce at the step
        self.replicas = Replicas(root, context, self.period)
        self.outer: Outer | None = None
        return root

    def wrap_optimizer(self, root: nn.Module, optimizer: Optimizer) -> None:
        self.replicas.optimizers.append(optimizer)

    def optimizer_step(
        self,
        root: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        clip: Clip | None,
        scaler: LossScaler | None,
        before_step: Callable[[Optimizer], None] | None = None,
    ) -> StepResult:
        if self.outer is None:
            self._begin({})  # now, since weights may have been given after `shard`
        result = super().optimizer_step(root, optimizers, clip=clip, scaler=scaler, before_step=before_step)
        if result.applied and self.replicas.count():  # whether it was applied, all ranks agree
            self._meet()
        return result

    def _begin(self, state: dict[str, Tensor]) -> None:
        if self.outer_lr is not None and self.replicas.several:
            self.outer = Outer(self.outer_lr, self.outer_momentum)
            self.outer.begin(self.replicas.parameters(), state)

    def _meet(self) -> None:
        self.replicas.average_()
        if self.outer is not None:
            self.outer.step_(self.replicas.parameters())

    def refresh(self, root: nn.Module) -> nn.Module:
        if self.changed(root):
            self._meet()  # what was frozen now would stay apart
            if self.outer is not None:
                self._begin(self.outer.state())
        return root

    def finish(self, root: nn.Module) -> None:
        if self.replicas.met != self.replicas.updates:
            self.replicas.average_()  # too few updates for an outer step

    def own_state(self, root: nn.Module) -> OwnState:
        own = self.replicas.state()
        outer = self.outer.state() if self.outer is not None else {}
        return OwnState({**own.alike, **outer}, own.apart)

    def load_own_state(self, root: nn.Module, state: OwnState) -> None:
        outer = {name: tensor for name, tensor in state.alike.items() if name.startswith(("anchor/", "momentum/"))}
        if not self.replicas.load(state, self.name) or (outer and self.outer_lr is None):
            super().load_own_state(root, state)
        elif outer:
            self._begin(outer)


def local_sgd(period: int = 8) -> LocalSGD:
    """Local SGD (Stich 2019): each rank clips and steps by itself, and weights are averaged every ``period`` updates.

    Args:
        period: updates from one average to the next.
    """
    return LocalSGD(period)


def diloco(period: int = 8, outer_lr: float = 0.7, outer_momentum: float = 0.9) -> LocalSGD:
    """DiLoCo (Douillard et al. 2023): local SGD whose average is the gradient of an outer step.

    Args:
        period: updates from one outer step to the next.
        outer_lr: learning rate of the outer step.
        outer_momentum: Nesterov momentum of the outer step.
    """
    return LocalSGD(period, outer_lr, outer_momentum)
