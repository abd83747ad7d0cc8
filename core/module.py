"""Module: what a user implements."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .run import Run
    from .trainer import Trainer


class HParams(SimpleNamespace):
    """Hyperparameters as attributes and as items."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def keys(self) -> list[str]:
        return list(vars(self))


class Module(nn.Module):
    """A model together with how it is trained. Implement `training_step` and `configure_optimizers`.

    Set ``automatic_optimization = False`` in ``__init__`` to call `manual_backward` and ``optimizers().step()``
    yourself. Where the model is sharded, a method ``blocks()`` of yours may return the list of submodules that are
    gathered and freed one by one, such as a transformer's layers; this class has none, since an attribute of that name
    is common.
    """

    automatic_optimization: bool = True

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None
        self._hparams: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None}  # a copy of a module doesn't belong to the run

    # ------------------------------------------------------------------------------------------------- to implement

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Return the mean loss over the batch (0-dim), or a mapping with it under ``"loss"``; None skips the batch.

        Under manual optimization the value is only passed on to `on_train_batch_end`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step(batch, batch_idx); fit needs one.")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Called without gradients. Takes a third argument ``dataloader_idx`` where there are several loaders."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step(batch, batch_idx).")

    def configure_optimizers(self) -> Any:
        """One optimizer; a list; ``([optimizers], [schedulers])``; or ``{"optimizer": ..., "lr_scheduler": ...}``.

        A scheduler may be a mapping with ``scheduler, interval ("epoch" or "update"), frequency, monitor``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers(); fit needs one.")

    def configure_model(self) -> None:
        """Build layers here rather than in ``__init__`` where a strategy shall build them in shards. Idempotent."""

    def batch_weight(self, batch: Any) -> float:
        """How much a batch counts in its update, for instance its number of tokens. By default its samples."""
        raise NotImplementedError("batch_weight is only called where it is overridden")

    def backward(self, loss: Tensor) -> None:
        """Backward of one weighted and scaled loss."""
        torch.autograd.backward(loss)

    def optimizer_zero_grad(self, optimizer: Optimizer) -> None:
        """Clear the gradients of an optimizer before the first micro-batch of an update."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; ``metric`` is the monitored value or None."""
        scheduler.step() if metric is None else scheduler.step(metric)

    # -------------------------------------------------------------------------------------------------- to call

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run that this module is in."""
        return self._attached().trainer

    @property
    def device(self) -> torch.device:
        """The device of the run, or of the first parameter outside one."""
        if self._run is not None:
            return self._run.engine.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self._run.progress.epoch if self._run else 0

    @property
    def global_step(self) -> int:
        """Updates applied since the start, whatever the number of optimizers."""
        return self._run.progress.update if self._run else 0

    @property
    def global_rank(self) -> int:
        return self._run.world.rank if self._run else 0

    @property
    def hparams(self) -> HParams:
        """What `save_hyperparameters` kept."""
        return HParams(**self._hparams)

    def save_hyperparameters(self, *names: str, ignore: tuple[str, ...] = ()) -> None:
        """Keep the arguments of the calling ``__init__`` in `hparams` (only ``names``, where given)."""
        frame = inspect.currentframe()
        caller = frame.f_back if frame else None
        if caller is None or caller.f_locals.get("self") is not self:
            raise ConfigurationError("save_hyperparameters() must be called in the module's own __init__.")
        info = inspect.getargvalues(caller)
        values = {name: info.locals[name] for name in info.args if name != "self"}
        values.update(info.locals.get(info.keywords or "", {}))
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ConfigurationError(
                f"save_hyperparameters: __init__ has no argument {unknown[0]!r}; it has {list(values)}."
            )
        self._hparams.update(
            {
                name: value
                for name, value in values.items()
                if name not in ignore and (not names or name in names) and not isinstance(value, nn.Module)
            }
        )

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        sync_dist: bool | None = None,
        batch_size: float | None = None,
    ) -> None:
        """Record a scalar. Nothing is read from the device until somebody looks.

        In `training_step` the default is ``on_step``; in `validation_step` and in epoch hooks ``on_epoch``. An epoch's
        value is weighted by the samples in each batch (or ``batch_size``) and reduced over all ranks by ``reduce_fx``
        (``"mean"``, ``"sum"``, ``"min"``, ``"max"``); a step's value only with ``sync_dist=True``.
        """
        self._attached().metrics.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, batch_size)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """`log` for each item."""
        for name, value in values.items():
            self.log(name, value, **options)

    def optimizers(self) -> Any:
        """The optimizer, or the list of them; under manual optimization wrapped so that ``step`` keeps the order of an
        update (reduce, unscale, clip, step)."""
        optimizers = self._attached().optimizers()
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The scheduler, or the list of them, or None."""
        schedulers = [schedule.scheduler for schedule in self._attached().engine.schedules]
        return (schedulers or [None])[0] if len(schedulers) < 2 else schedulers

    def manual_backward(self, loss: Tensor) -> None:
        """Backward under manual optimization: weights the micro-batch and scales the loss as the run needs it."""
        self._attached().manual_backward(loss)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients until `untoggle_optimizer`."""
        self._attached().toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        self._attached().untoggle()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack a tensor of the same shape from all ranks: ``(world_size, *shape)``. All ranks must call it."""
        run = self._attached()
        if run.world.world_size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(run.world.world_size)]
        torch.distributed.all_gather(parts, tensor.contiguous())  # all ranks
        return torch.stack(parts)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0 only."""
        if self.global_rank == 0:
            print(*args, **kwargs)

    def _attached(self) -> Run:
        if self._run is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not in a run: this works only in methods that trainer.fit or validate calls."
            )
        return self._run

    # ---------------------------------------------------------------------------------------------------- hooks

    def prepare_data(self) -> None:
        """Download or tokenize, once per machine, before `setup`. Assign nothing to the module here."""

    def setup(self, stage: str) -> None: ...

    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no train_dataloader(), and fit was given no loader.")

    def val_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no val_dataloader(), and no loader was given.")

    def on_fit_start(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_update_end(self) -> None: ...

    def on_validation_start(self) -> None: ...

    def on_validation_end(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...

    def on_before_backward(self, loss: Tensor) -> None: ...

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
