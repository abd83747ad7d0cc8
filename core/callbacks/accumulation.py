"""GradientAccumulationScheduler: more or fewer micro-batches in an update, from given epochs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Sets ``accumulate_grad_batches`` at the start of epochs: ``{0: 8, 4: 4, 8: 1}``.

    Args:
        scheduling: epoch, from 0 -> micro-batches of each rank in one update. Before the first the Trainer's own holds.
    """

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        if not scheduling:
            raise ConfigurationError("GradientAccumulationScheduler(scheduling={}): expected {epoch: batches}.")
        for epoch, batches in scheduling.items():
            if type(epoch) is not int or epoch < 0 or type(batches) is not int or batches < 1:
                raise ConfigurationError(
                    f"GradientAccumulationScheduler(scheduling={dict(scheduling)!r}): {epoch!r}: {batches!r} is not an "
                    "epoch from 0 up and a number of batches from 1 up."
                )
        self.scheduling = dict(sorted(scheduling.items()))

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.global_batch_size is not None:
            raise ConfigurationError(
                "GradientAccumulationScheduler and Trainer(global_batch_size=...) both say how large an update is; "
                "use one of them."
            )
        if trainer.strategy.own_folder is not None:
            raise ConfigurationError(
                "GradientAccumulationScheduler: this strategy fixes the size of an update before training. "
                "Use --strategy fsdp, zero or ddp."
            )

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        due = [batches for epoch, batches in self.scheduling.items() if epoch <= trainer.progress.epoch]
        if due:
            trainer.set_accumulation(due[-1])
