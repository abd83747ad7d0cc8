"""The hooks of a module, none of which does anything unless it is overridden."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    import torch


class ModuleHooks(nn.Module):
    """What the Trainer calls besides the steps: around a run, an epoch, a batch and an update, and for data.

    Callbacks have the same hooks and are called before the module. Only what is overridden is ever called.
    """

    prepare_data_per_node: bool = True  # False: `prepare_data` runs on one machine only, which shares its files

    # ------------------------------------------------------------------------------------------------------- a run

    def prepare_data(self) -> None:
        """Download or tokenize, once per machine, before `setup`. Assign nothing to the module here."""

    def setup(self, stage: str) -> None:
        """In every process, before `Module.configure_model`; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """The last hook, also after an exception."""

    def on_fit_start(self) -> None:
        """Everything is built and a checkpoint is restored."""

    def on_fit_end(self) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_exception(self, exception: BaseException) -> None:
        """On every rank, also on those where another rank's failure arrives as `RankFailed`."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put plain data of your own into ``checkpoint``."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` put there."""

    # -------------------------------------------------------------------------------------------------------- data

    def train_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no train_dataloader(), and fit was given no loader.")

    def val_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no val_dataloader(), and no loader was given.")

    def test_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no test_dataloader(), and no loader was given.")

    def predict_dataloader(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no predict_dataloader(), and no loader was given.")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what shall be moved to the device instead of ``batch``. A data module's own comes first."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on ``device``; needed for batches that are not made of tensors in lists and dicts."""
        from .data.transfer import to_device

        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return what the step shall get instead of ``batch``, for instance augmented on the device."""
        return batch

    # ---------------------------------------------------------------------------------------------------- training

    def on_train_epoch_start(self) -> None:
        """Not called again for an epoch that is resumed in its middle."""

    def on_train_epoch_end(self) -> None:
        """After the epoch's validation. Not called for an epoch that a limit ended in its middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Return -1, on all ranks and for the first batch of an update, to end the epoch before this batch."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...

    def on_before_backward(self, loss: Tensor) -> None: ...

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Gradients are reduced and unscaled, not yet clipped."""

    def on_update_end(self) -> None:
        """After every update, applied or not, before a validation that is due there."""

    # -------------------------------------------------------------------------------------------------- evaluation

    def on_validation_start(self) -> None: ...

    def on_validation_end(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_validation_model_eval(self) -> None:
        """Go into evaluation mode."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Go back to training; unless this is overridden each submodule gets back the mode that it had."""
        self.train()

    def on_validation_model_zero_grad(self) -> None:
        """Before a validation within a fit, for instance to free the memory of gradients."""

    def on_test_start(self) -> None: ...

    def on_test_end(self) -> None: ...

    def on_test_epoch_start(self) -> None: ...

    def on_test_epoch_end(self) -> None: ...

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_model_eval(self) -> None:
        self.eval()

    def on_test_model_train(self) -> None:
        self.train()

    def on_predict_start(self) -> None: ...

    def on_predict_end(self) -> None: ...

    def on_predict_epoch_start(self) -> None: ...

    def on_predict_epoch_end(self) -> None: ...

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_model_eval(self) -> None:
        self.eval()
