"""OnExceptionCheckpoint: a checkpoint when an exception ends training."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import STOPS, CheckpointError, ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


class OnExceptionCheckpoint(Callback):
    """Saves ``dirpath/filename`` when an exception ends training between two updates.

    On several processes only a stop that all of them agreed on counts (Ctrl-C, a signal). An exception from within an
    update leaves a state that no run could go on from exactly: then nothing is saved, and a warning says so. An
    earlier checkpoint of the name is replaced once the new one is complete, and none is ever deleted.

    Args:
        dirpath: where it is saved.
        filename: its name.
    """

    saves: ClassVar[bool] = True

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigurationError("OnExceptionCheckpoint(filename=''): expected a name.")
        self.dirpath, self.filename = os.fspath(dirpath), filename
        self._training = False

    @property
    def state_key(self) -> str:
        return f"OnExceptionCheckpoint[{self.dirpath!r}, {self.filename!r}]"

    @property
    def ckpt_path(self) -> str:
        """Where the checkpoint is saved."""
        return str(Path(self.dirpath, self.filename))

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._training = True

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._training = False

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        if not self._training:
            return
        self._training = False
        name: Any = type(exception).__name__
        if trainer.world_size > 1 and not isinstance(exception, STOPS):
            reason = "the ranks did not all end at the same update"
        elif not trainer.at_boundary:
            reason = "it was raised within an update"
        else:
            try:
                trainer.save_checkpoint(self.ckpt_path)
                return
            except CheckpointError as error:  # the exception that ends training is the one to be seen
                reason = str(error)
        if trainer.is_global_zero:
            warnings.warn(f"OnExceptionCheckpoint: nothing was saved on {name}: {reason}", stacklevel=2)
