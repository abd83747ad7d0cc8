"""Module: what a user implements."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import gradients
from .errors import ConfigurationError
from .hparams import HParams as HParams
from .hparams import chosen
from .metric_objects import is_collection, refused
from .module_hooks import ModuleHooks

if TYPE_CHECKING:
    from typing import Self

    from .run import Run
    from .trainer import Trainer


class Module(ModuleHooks):
    """A model together with how it is trained. Implement `training_step` and `configure_optimizers`.

    Set ``automatic_optimization = False`` in ``__init__`` to call `manual_backward` and ``optimizers().step()``
    yourself. Where the model is sharded, a method ``blocks()`` of yours may return the list of submodules that are
    gathered and freed one by one, such as a transformer's layers; this class has none, since an attribute of that name
    is common.
    """

    automatic_optimization: bool = True
    strict_loading: bool = True  # whether `load_from_checkpoint` asks for every name of the module's
    logs_hparams: bool = True  # whether loggers get the hyperparameters
    example_input_array: Any = None  # a batch, or a tuple or dict of arguments for forward, for summaries and graphs

    def __init__(self) -> None:
        super().__init__()
        self._run: Run | None = None
        self._trainer: Trainer | None = None
        self._hparams = HParams()
        from .hooks import check_names

        check_names(self, Module)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_trainer": None}  # a copy of a module doesn't belong to the run

    # ------------------------------------------------------------------------------------------------- to implement

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any] | None:
        """Return the mean loss over the batch (0-dim), or a mapping with it under ``"loss"``; None skips the batch.

        Under manual optimization the value is only passed on to `on_train_batch_end`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step(batch, batch_idx); fit needs one.")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Called without gradients. Takes a third argument ``dataloader_idx`` where there are several loaders."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step(batch, batch_idx).")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """The same for `Trainer.test`."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step(batch, batch_idx).")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """What `Trainer.predict` returns of each batch: by default the module called with the batch."""
        return self(batch)

    def configure_callbacks(self) -> Any:
        """A callback or a list; each takes the place of the Trainer's callbacks of its own class."""
        return []

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

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward of one weighted and scaled loss; ``options`` are those that were given to `manual_backward`."""
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step an optimizer. Gradients are accumulated; ``optimizer.step(optimizer_closure)`` does the rest of the
        update (reduce, unscale, check, clip, step), and the closure only returns the loss. An override that does not
        call it skips the update. Not called under manual optimization."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of an optimizer before the first micro-batch of an update."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of one optimizer, which are reduced and unscaled; override it to clip in another way.

        The values are the Trainer's. Without an override all optimizers are clipped by their common norm.
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; ``metric`` is the monitored value or None."""
        scheduler.step() if metric is None else scheduler.step(metric)

    # -------------------------------------------------------------------------------------------------- to call

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run that this module is in, or of the last one."""
        if self._trainer is None:
            raise ConfigurationError(f"{type(self).__name__} is not attached to a Trainer: no job of one had it yet.")
        return self._trainer

    @property
    def device(self) -> torch.device:
        """The device of the run, or of the first parameter outside one."""
        if self._run is not None:
            return self._run.engine.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def current_epoch(self) -> int:
        """Epochs completed."""
        return self._trainer.progress.epoch if self._trainer else 0

    @property
    def global_step(self) -> int:
        """Updates applied since the start, whatever the number of optimizers."""
        return self._trainer.progress.update if self._trainer else 0

    @property
    def global_rank(self) -> int:
        return self._trainer.world.rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return self._trainer.world.local_rank if self._trainer else 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def logger(self) -> Any:
        """The Trainer's first logger, or None."""
        return self._trainer.logger if self._trainer else None

    @property
    def loggers(self) -> list[Any]:
        return self._trainer.loggers if self._trainer else []

    @property
    def hparams(self) -> HParams:
        """What `save_hyperparameters` kept."""
        return self._hparams

    def save_hyperparameters(self, *given: Any, ignore: str | Iterable[str] = (), logger: bool = True) -> None:
        """Keep the arguments of the calling ``__init__``, and of those of subclasses, in `hparams`.

        ``given``: names of those to keep, or a mapping or namespace to keep instead. ``ignore``: names to leave out.
        ``logger``: whether loggers get them.
        """
        frame = inspect.currentframe()
        self._hparams.update(chosen(self, frame.f_back if frame else None, given, ignore))
        self.logs_hparams = logger

    @classmethod
    def load_from_checkpoint(
        cls, checkpoint_path: str | Path, map_location: Any = None, strict: bool | None = None, **overrides: Any
    ) -> Self:
        """A module with the weights of a checkpoint, made with the hyperparameters in it; ``overrides`` win."""
        from .checkpoint.module import load_module

        return load_module(cls, checkpoint_path, map_location, strict, overrides)

    def freeze(self) -> None:
        """No parameter requires gradients, and evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """All parameters require gradients, and training mode."""
        self.requires_grad_(True)
        self.train()

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | str | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record a number, a 0-dim tensor, or a metric object. Nothing is read from the device until somebody looks.

        Args:
            name: with ``on_step`` and ``on_epoch`` both, rows have ``name_step`` and ``name_epoch``.
            value: it is copied, so it may be changed afterwards. An object with ``update, compute, reset`` (of
                torchmetrics, for instance) that is an attribute of the module: at the end of the epoch ``compute``
                gives the value, over all ranks if it synchronises itself, and ``reset`` follows.
            prog_bar: show it on the progress bar.
            logger: write it to the loggers.
            on_step: write the newest value every ``log_every_n_steps``; the default in training steps.
            on_epoch: write the epoch's value, reduced over its steps and over all ranks; the default elsewhere.
            reduce_fx: how: ``"mean"`` (weighted by the samples in each batch), ``"sum"``, ``"min"``, ``"max"``, or
                torch's function of that name.
            sync_dist: reduce a step's value over all ranks too. ``"sparse"``: over those that log it, for step and
                epoch; without that all ranks have to log the same names.
            add_dataloader_idx: append ``/dataloader_idx_N`` where there are several loaders. Without it the values of
                all loaders are one metric.
            batch_size: the weight of this value in the epoch's mean, instead of the known samples.
            metric_attribute: the attribute that holds the metric object; found by itself.
            rank_zero_only: the value is rank 0's own; calls on other ranks do nothing.
            enable_graph, sync_dist_group: Lightning's; other values than the default are refused.

        Raises ConfigurationError in hooks that belong to no step and no epoch.
        """
        if enable_graph or sync_dist_group is not None:
            raise refused(name, enable_graph)
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only)
        (self._run or self._attached()).metrics.log(
            name, value, options, batch_size, add_dataloader_idx, metric_attribute
        )

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | str | None = None,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """`log` for each item. A MetricCollection of torchmetrics is computed as a whole and gives its own names."""
        if enable_graph or sync_dist_group is not None:
            raise refused(str(next(iter(dictionary), "")), enable_graph)
        metrics = self._attached().metrics
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, rank_zero_only)
        if is_collection(dictionary):
            metrics.log_collection(dictionary, options, add_dataloader_idx)
            return
        for name, value in dictionary.items():
            metrics.log(name, value, options, batch_size, add_dataloader_idx, None)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or the list of them; under manual optimization wrapped so that ``step`` keeps the order of an
        update (reduce, unscale, clip, step)."""
        optimizers = self._attached().optimizers()
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """The scheduler, or the list of them, or None."""
        schedulers = [schedule.scheduler for schedule in self._attached().engine.schedules]
        return (schedulers or [None])[0] if len(schedulers) < 2 else schedulers

    def manual_backward(self, loss: Tensor, **options: Any) -> None:
        """Backward under manual optimization: weights the micro-batch and scales the loss as the run needs it.

        ``options`` are ``Tensor.backward``'s, such as ``retain_graph``.
        """
        self._attached().manual_backward(loss, **options)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer by ``"norm"`` or ``"value"``; nothing where the value is None.

        Under manual optimization it takes effect in the optimizer's next ``step``, when gradients are reduced over the
        ranks and unscaled. Else it belongs into `configure_gradient_clipping`.
        """
        self._attached().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only this optimizer's parameters require gradients until `untoggle_optimizer`."""
        self._attached().toggle(optimizer)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        self._attached().untoggle()

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """`toggle_optimizer` and, at the end, `untoggle_optimizer`."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Stack each tensor in ``data`` (a tensor, or lists and dicts of them), of the same shape on all ranks:
        ``(world_size, *shape)``. All ranks must call it. With ``sync_grads`` gradients flow back to their ranks."""
        return gradients.gather(data, self._attached().world, sync_grads)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank 0 only."""
        if self.global_rank == 0:
            print(*args, **kwargs)

    def _attached(self) -> Run:
        if self._run is None:
            raise ConfigurationError(
                f"{type(self).__name__} is not in a run: this works only in methods that the Trainer calls."
            )
        return self._run
