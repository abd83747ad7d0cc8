"""StochasticWeightAveraging: the mean of the weights after each of the last epochs, at a learning rate of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .averaging import WeightAveraging

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


class StochasticWeightAveraging(WeightAveraging):
    """Stochastic weight averaging (Izmailov et al. 2018): from an epoch on, the learning rate goes to ``swa_lrs`` and
    the weights after each epoch are averaged. `fit` leaves the average in the module.

    As in `WeightAveraging`, validation sees the average. BatchNorm's statistics are averaged like the weights; for
    those of a pass over the data, call ``torch.optim.swa_utils.update_bn(loader, module)`` after `fit`.

    Args:
        swa_lrs: the learning rate, or one for each parameter group.
        swa_epoch_start: the first epoch whose weights count: its number from 0, or a fraction of ``max_epochs``.
        annealing_epochs: epochs in which the learning rate goes from where it is to ``swa_lrs``.
        annealing_strategy: ``"cos"`` or ``"linear"``.
        avg_fn: see `WeightAveraging`; by default the mean.
        device: see `WeightAveraging`.
    """

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        device: str | int | torch.device | None = None,
    ) -> None:
        rates: list[Any] = list(swa_lrs) if isinstance(swa_lrs, (list, tuple)) else [swa_lrs]
        if not rates or not all(isinstance(rate, (int, float)) and rate > 0 for rate in rates):
            raise ConfigurationError(f"StochasticWeightAveraging(swa_lrs={swa_lrs!r}): expected positive numbers.")
        as_fraction = isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start <= 1
        if not as_fraction and not (type(swa_epoch_start) is int and swa_epoch_start >= 0):
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_epoch_start={swa_epoch_start!r}): expected a number from 0 up, or a "
                "fraction from 0.0 to 1.0."
            )
        if annealing_strategy not in ("cos", "linear"):
            raise ConfigurationError(
                f"StochasticWeightAveraging(annealing_strategy={annealing_strategy!r}): expected 'cos' or 'linear'."
            )
        super().__init__(device, avg_fn=avg_fn)
        self.swa_lrs, self.swa_epoch_start, self.annealing_epochs = swa_lrs, swa_epoch_start, annealing_epochs
        self.annealing_strategy = annealing_strategy
        self._rates: list[float] = rates
        self._first_epoch = 0
        self._start_rates: list[float] = []  # of all groups of all optimizers, when averaging began

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "start_rates": list(self._start_rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._start_rates = list(state["start_rates"])

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None and epoch_idx >= self._first_epoch

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        super().on_fit_start(trainer, module)
        start = self.swa_epoch_start
        if isinstance(start, float):
            if trainer.max_epochs is None:
                raise ConfigurationError(
                    f"StochasticWeightAveraging(swa_epoch_start={start}) is a fraction of max_epochs, which is not "
                    "given. Give the number of an epoch."
                )
            start = int(trainer.max_epochs * start)
        self._first_epoch = start
        groups = sum(len(optimizer.param_groups) for optimizer in trainer.optimizers)
        if len(self._rates) not in (1, groups):
            raise ConfigurationError(
                f"StochasticWeightAveraging(swa_lrs={self.swa_lrs!r}): {len(self._rates)} rates for {groups} parameter "
                "groups. Give one, or one for each."
            )
        if any(schedule.interval == "update" for schedule in trainer.engine.schedules):
            raise ConfigurationError(
                "StochasticWeightAveraging sets the learning rate of its epochs, and a scheduler with interval 'step' "
                "would set it at every update. Use interval 'epoch', or WeightAveraging, which leaves it alone."
            )

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        epoch = trainer.progress.epoch - self._first_epoch
        if epoch < 0:
            return
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if not self._start_rates:
            self._start_rates = [float(group["lr"]) for group in groups]
        part = min(1.0, epoch / self.annealing_epochs) if self.annealing_epochs else 1.0
        if self.annealing_strategy == "cos":
            part = (1 - math.cos(math.pi * part)) / 2
        ends = self._rates if len(self._rates) > 1 else self._rates * len(groups)
        for group, begin, end in zip(groups, self._start_rates, ends, strict=True):
            group["lr"] = begin + (end - begin) * part
