"""WeightAveraging and EMAWeightAveraging: averages of the weights, used in validation and kept in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from ..errors import ConfigurationError
from ..layout import sharded
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer

CURRENT = "averaging.current"


class WeightAveraging(Callback):
    """Keeps an average of the weights beside them: validation sees it, and it is what `fit` leaves in the module.

    Works on what each rank holds, so under sharded strategies an average is as sharded as the weights. It is in
    float32 where they are in fewer bits. In checkpoints the module's names hold the averages, and the weights
    that training goes on with are stored beside them; so a best checkpoint holds what its metric was computed from.

    Override `should_update` to choose when. Without a function the average is the mean of all weights (SWA).

    Args:
        device: where averages are kept: by default where the weights are. Not for sharded weights.
        use_buffers: average floating-point buffers too (such as BatchNorm's statistics); False leaves them as they are.
        avg_fn: ``(average, current, count) -> average`` for one tensor, as torch's `AveragedModel` has it.
        multi_avg_fn: ``(averages, currents, count)`` for lists of tensors, in place.

    Attributes:
        n_averaged: how many weights the average is made of.
    """

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
        multi_avg_fn: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigurationError(f"{type(self).__name__}: give avg_fn or multi_avg_fn, not both.")
        self.device = None if device is None else torch.device(device)
        self.use_buffers, self.avg_fn, self.multi_avg_fn = use_buffers, avg_fn, multi_avg_fn
        self.n_averaged = 0
        self._latest_update_step = 0
        self._latest_update_epoch = -1
        self._fitting = False
        self._averages: dict[str, Tensor] = {}
        self._current: dict[str, Tensor] = {}  # what training goes on with, while the module holds the averages

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_averages": {}, "_current": {}}

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to take the weights into the average after the update ``step_idx``, or after the epoch ``epoch_idx``.

        Both count from 0; one of them is None. Asked on all ranks, which must answer alike.
        """
        return step_idx is not None

    # ------------------------------------------------------------------------------------------------------- hooks

    def state_dict(self) -> dict[str, Any]:
        return {
            "n_averaged": self.n_averaged,
            "latest_update_step": self._latest_update_step,
            "latest_update_epoch": self._latest_update_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_averaged = state["n_averaged"]
        self._latest_update_step, self._latest_update_epoch = state["latest_update_step"], state["latest_update_epoch"]

    def checkpoint_tensors(self, trainer: Trainer, module: Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self._fitting:
            return tensors
        self._begin(trainer, tensors)
        current = {name: self._current.get(name, tensors[name]) for name in self._averages}
        return {**tensors, **self._averages, **{f"{CURRENT}/{name}": tensor for name, tensor in current.items()}}

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._fitting = stage == "fit"

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        self._begin(trainer, trainer.strategy.state_dict(module))

    def on_update_end(self, trainer: Trainer, module: Module) -> None:
        update = trainer.progress.update
        if update > self._latest_update_step and self.should_update(step_idx=update - 1):
            self._latest_update_step = update
            self._take(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        epoch = trainer.progress.epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._latest_update_epoch = epoch
            self._take(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self._averages and self.n_averaged:
            self._current = self._put(trainer, module, self._averages)

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._current:
            current, self._current = self._current, {}
            self._put(trainer, module, current)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """After the last checkpoint, which is one to go on from."""
        if self.n_averaged:
            self._put(trainer, module, self._averages)

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._averages, self._current, self._fitting = {}, {}, False

    # ------------------------------------------------------------------------------------------------------ inside

    def _begin(self, trainer: Trainer, tensors: dict[str, Tensor]) -> None:
        """Make room for the averages, once per fit: on resume before a checkpoint is read into it."""
        if self._averages:
            return
        if any(name.startswith(CURRENT) for name in tensors):
            raise ConfigurationError("two callbacks average the weights; one of them can be used at a time.")
        if trainer.strategy.own_folder is not None:
            raise ConfigurationError(
                f"{type(self).__name__}: this strategy steps copies of the parameters that it keeps for itself, so "
                "others cannot be put in their place. Use --strategy fsdp, zero or ddp."
            )
        if trainer.strategy.synchronises_every > 1 and trainer.world.world_size > 1:
            raise ConfigurationError(
                f"{type(self).__name__}: ranks hold different weights, of which a checkpoint would hold one average. "
                "Use --strategy fsdp, zero or ddp."
            )
        params = {name for name, _ in trainer.engine.module.named_parameters(remove_duplicate=False)}
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and (self.use_buffers or name in params):
                if self.device is not None and sharded(tensor) is not None:
                    raise ConfigurationError(
                        f"{type(self).__name__}(device={str(self.device)!r}): sharded averages stay where the weights "
                        "are. Leave device out."
                    )
                dtype = torch.promote_types(tensor.dtype, torch.float32)
                self._averages[name] = tensor.detach().to(device=self.device, dtype=dtype, copy=True)
        self.n_averaged, self._latest_update_step, self._latest_update_epoch = 0, trainer.progress.update, -1

    @torch.no_grad()
    def _take(self, trainer: Trainer, module: Module) -> None:
        tensors = trainer.strategy.state_dict(module)
        averages = [_local(average) for average in self._averages.values()]
        current = [
            _local(tensors[name].detach()).to(average)
            for name, average in zip(self._averages, averages, strict=True)
        ]  # fmt: skip
        if self.n_averaged == 0:
            for average, value in zip(averages, current, strict=True):
                average.copy_(value)
        elif self.avg_fn is not None:
            for average, value in zip(averages, current, strict=True):
                average.copy_(self.avg_fn(average, value, self.n_averaged))
        else:
            function = self.multi_avg_fn or get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
            for few, values in _by_kind(averages, current):
                function(few, values, self.n_averaged)
        self.n_averaged += 1

    @torch.no_grad()
    def _put(self, trainer: Trainer, module: Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write tensors into the module, in place; returns copies of what was there."""
        tensors = trainer.strategy.state_dict(module)
        before = {name: tensors[name].detach().clone() for name in values}
        for name, value in values.items():
            _local(tensors[name].detach()).copy_(_local(value))
        return before


class EMAWeightAveraging(WeightAveraging):
    """An exponential moving average: ``average = decay * average + (1 - decay) * weights``.

    Args:
        device: see `WeightAveraging`.
        use_buffers: see `WeightAveraging`.
        decay: the average's share that stays at each update of it.
        update_every_n_steps: take the weights in after every n-th update; 0 for none.
        update_starting_at_step: not before this update, counted from 0.
        update_starting_at_epoch: take the weights in after each epoch too, from this one on, counted from 0.
    """

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigurationError(f"EMAWeightAveraging(decay={decay!r}): expected a number from 0 to 1.")
        super().__init__(device, use_buffers, multi_avg_fn=get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
        self.decay, self.update_every_n_steps = decay, update_every_n_steps
        self.update_starting_at_step, self.update_starting_at_epoch = update_starting_at_step, update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            start = self.update_starting_at_step or 0
            return step_idx >= start and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        start_epoch = self.update_starting_at_epoch
        return epoch_idx is not None and start_epoch is not None and epoch_idx >= start_epoch


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds, sharing its memory."""
    found = sharded(tensor)
    return tensor if found is None else found.to_local()


def _by_kind(averages: list[Tensor], current: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Lists of one dtype and device each, which torch's foreach functions take at once."""
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for average, value in zip(averages, current, strict=True):
        if average.numel():
            few, values = kinds.setdefault((average.dtype, average.device), ([], []))
            few.append(average)
            values.append(value)
    yield from kinds.values()
