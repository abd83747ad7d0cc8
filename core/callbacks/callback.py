"""Callback: what can be attached to a run from outside the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ..module import Module
    from ..trainer import Trainer


class Callback:
    """Override any hook; only overridden ones are ever called. Hooks run on every rank, in list order, before the
    module's own. An object that saves the run sets ``saves`` and is called last; one that acts on an epoch's metrics
    sets ``watches``: its `on_train_epoch_end` comes when they are known, before those who save. One that an installed
    package brings (entry points: trivet.callbacks) is attached where it is named, ``Trainer(callbacks=["name"])``,
    never by itself."""

    interface: ClassVar[int] = 1
    saves: ClassVar[bool] = False
    watches: ClassVar[bool] = False

    @property
    def state_key(self) -> str:
        """The name under which `state_dict` is stored. Two of one class that keep state must differ in it."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Plain data (None, bool, int, float, str, tensors, lists, tuples, dicts) to be stored in checkpoints."""
        return {}

    def checkpoint_tensors(self, trainer: Trainer, module: Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint of a fit holds under the names of the module's ``tensors``, and more under other names.

        Asked on all ranks when a checkpoint is written, and before one is read, which is read into what it returns.
        """
        return tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned: on resume, and in the calling process when a launched run has ended."""

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """In every process that trains, before `Module.configure_model`; ``stage`` is the entry point's name."""

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """The last hook, also after an exception."""

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Everything is built and a checkpoint is restored."""

    def on_fit_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_train_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_train_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        """Not called again for an epoch that is resumed in its middle."""

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """After the epoch's validation. Not called for an epoch that a limit ended in its middle."""

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None: ...

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...

    def on_update_end(self, trainer: Trainer, module: Module) -> None:
        """After every update, applied or not, before a validation that is due there."""

    def on_validation_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """After validation's metrics are in ``trainer.callback_metrics``."""

    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_test_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_test_epoch_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_test_epoch_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_predict_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_predict_epoch_start(self, trainer: Trainer, module: Module) -> None: ...

    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_predict_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None: ...

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None: ...

    def on_after_backward(self, trainer: Trainer, module: Module) -> None: ...

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        """Gradients are reduced and unscaled, not yet clipped."""

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """On every rank, also on those where another rank's failure arrives as `RankFailed`."""

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Put plain data of your own into ``checkpoint``."""

    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` put there."""
