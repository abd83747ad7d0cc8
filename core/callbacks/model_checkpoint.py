"""ModelCheckpoint: `Checkpoint` under Lightning's name, with Lightning's arguments."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer
    from .keeping import Save

_NAMED = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


class ModelCheckpoint(Checkpoint):
    """Saves checkpoints and keeps the best or the newest, as Lightning's class of this name does.

    What differs follows from what a checkpoint is here: a directory, complete or not there at all, from which training
    goes on. ``{epoch}`` counts the epochs that are completed. The newest one is named in ``last.json``, no
    ``last.ckpt`` is written. A monitored value belongs to exactly the weights that are saved; see `Checkpoint`.

    Args:
        dirpath: see `Checkpoint`.
        filename: a template; ``"{epoch}-{val_loss:.2f}"`` gives ``epoch=3-val_loss=0.12``.
        monitor: see `Checkpoint`.
        verbose: print what is saved.
        save_last: keep the newest too; ``"link"`` means the same, since it is named in a file and not copied.
        save_top_k: see `Checkpoint`.
        save_on_exception: see `Checkpoint`.
        save_weights_only: refused: see the message.
        mode: see `Checkpoint`.
        auto_insert_metric_name: False for a ``filename`` whose fields give the values alone.
        every_n_train_steps: save at every n-th update. At most one of this and the next two is given.
        train_time_interval: save after so much time.
        every_n_epochs: save in every n-th epoch; 0 for never.
        save_on_train_epoch_end: True to save at the end of an epoch, False after each validation. By default the latter
            where an epoch has several validations or none.
        enable_version_counter: False to replace a checkpoint of the same name instead of adding ``-v1``.
        save_async: see `Checkpoint`.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        save_async: bool = False,
    ) -> None:
        if save_weights_only:
            raise ConfigurationError(
                "ModelCheckpoint(save_weights_only=True): every checkpoint here is one to resume from. The weights "
                "alone are read from it with trivet.checkpoint.directory.read_weights(path)."
            )
        if save_last not in (None, True, False, "link"):
            raise ConfigurationError(f"ModelCheckpoint(save_last={save_last!r}): expected True, False or 'link'.")
        given = {
            "every_n_train_steps": every_n_train_steps,
            "train_time_interval": train_time_interval,
            "every_n_epochs": every_n_epochs,
        }
        several = [f"{name}={value!r}" for name, value in given.items() if value]
        if len(several) > 1:
            raise ConfigurationError(
                f"ModelCheckpoint got {', '.join(several)}; give one of them, or several ModelCheckpoints."
            )
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={save_top_k}) without a monitor: there is no best. Give monitor, or "
                "save_top_k -1 (all), 0 (none) or 1 (the newest)."
            )
        template = "{epoch}-{step}" if filename is None else filename
        super().__init__(
            dirpath,
            filename=_NAMED.sub(r"\1=\g<0>", template) if auto_insert_metric_name else template,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=bool(save_last),
            every_n_updates=every_n_train_steps or None,
            every_n_epochs=every_n_epochs if every_n_epochs is not None or len(several) == 0 else 0,
            every_n_minutes=None if train_time_interval is None else train_time_interval.total_seconds() / 60,
            save_on_exception=save_on_exception,
            save_async=save_async,
        )
        self.verbose, self.auto_insert_metric_name = verbose, auto_insert_metric_name
        self.every_n_train_steps, self.train_time_interval = every_n_train_steps, train_time_interval
        self.save_on_train_epoch_end, self.enable_version_counter = save_on_train_epoch_end, enable_version_counter

    @property
    def state_key(self) -> str:
        return f"Model{super().state_key}"

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the ranked checkpoints that are kept, which is replaced next; ``""`` where none is ranked."""
        worst = max if self.mode == "min" else min
        return worst(self.best_k_models, key=self.best_k_models.__getitem__, default="")

    @property
    def kth_value(self) -> float | None:
        """The monitored value of `kth_best_model_path`."""
        return self.best_k_models.get(self.kth_best_model_path)

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        super().on_train_start(trainer, module)
        validates = bool(trainer.num_val_batches)
        at_epoch_end = self.save_on_train_epoch_end
        if at_epoch_end is None:
            each_epoch = trainer.val_check_interval == 1.0 and trainer.limits.val_every_epochs == 1
            at_epoch_end = each_epoch or not validates
        self._saves_at_epoch_end = at_epoch_end

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        super().on_validation_end(trainer, module)
        due = bool(self.every_n_epochs) and (trainer.progress.epoch + 1) % (self.every_n_epochs or 1) == 0
        if due and self._training and not self._saves_at_epoch_end:
            self._save(trainer)

    def _book(self, trainer: Trainer, save: Save, boundary: int) -> None:
        super()._book(trainer, save, boundary)
        if self.verbose and trainer.is_global_zero:
            score = "" if self.current_score is None else f", {self.monitor} = {self.current_score:.5g}"
            print(f"ModelCheckpoint: saved {self.last_model_path}{score}", flush=True)

    def _free_path(self, trainer: Trainer, metrics: dict[str, float], prefix: str = "") -> str:
        path = Path(super()._free_path(trainer, metrics, prefix))
        if self.enable_version_counter:
            return str(path)
        return str(path.with_name(prefix + self.format_name(trainer.progress.epoch, trainer.progress.update, metrics)))
