"""ThroughputMonitor: batches, samples, items and floating-point operations per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


@dataclass
class _Seen:
    """What this rank has done since training started, validation apart."""

    seconds: float = 0.0
    batches: int = 0
    samples: float = 0.0
    items: float = 0.0
    flops: float = 0.0


class ThroughputMonitor(Callback):
    """Logs throughput as ``train/device/samples_per_sec`` and, over all ranks, ``train/samples_per_sec``.

    Likewise ``batches_per_sec``; ``items_per_sec`` where ``length_fn`` is given; ``flops_per_sec`` where the module has
    an attribute ``flops_per_batch``, and ``device/mfu`` where ``available_flops`` is given too. Beside them the totals
    ``train/time``, ``batches``, ``samples`` and ``lengths``. The device is waited for once a row of
    ``log_every_n_steps``; the time of validation is not counted.

    Args:
        batch_size_fn: the number of samples in a batch. By default it is taken from what the loader dealt.
        length_fn: the number of items (tokens) in a batch.
        window_size: rates are over at least so many of the newest batches, and at least one row.
        separator: between the parts of a name.
        available_flops: what the device can do in a second at most, in the dtype of the run: its data sheet says it.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: int = 100,
        separator: str = "/",
        available_flops: float | None = None,
    ) -> None:
        if window_size < 1:
            raise ConfigurationError(f"ThroughputMonitor(window_size={window_size!r}): expected a positive number.")
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.window_size, self.separator, self.available_flops = window_size, separator, available_flops
        self._total = _Seen()
        self._points: deque[_Seen] = deque()
        self._started = self._paused = 0.0
        self._update = 0
        self._samples = 0.0

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        trainer.engine.accelerator.synchronize()
        self._total, self._points = _Seen(), deque([_Seen()])
        self._started, self._update, self._samples = time.perf_counter(), trainer.progress.update, -1.0

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if self._samples < 0:  # the loader's count before the first update of this part of the run
            self._samples = trainer.progress.samples

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        total, update = self._total, trainer.progress.update
        total.batches += 1
        if self.batch_size_fn is not None:
            total.samples += self.batch_size_fn(batch)
        if self.length_fn is not None:
            total.items += self.length_fn(batch)
        total.flops += getattr(module, "flops_per_batch", None) or 0.0  # the user's, who may not have it
        if update == self._update or update % trainer.log_every_n_steps:
            return
        self._update = update
        if self.batch_size_fn is None:  # the ranks' pieces differ by one sample at most
            total.samples = (trainer.progress.samples - self._samples) / trainer.world_size
        trainer.engine.accelerator.synchronize()
        total.seconds = time.perf_counter() - self._started
        self._log(trainer, module)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self._points:
            trainer.engine.accelerator.synchronize()  # what training has asked for is training's time
            self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._points and not trainer.sanity_checking:
            self._started += time.perf_counter() - self._paused

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._points.clear()

    def _log(self, trainer: Trainer, module: Module) -> None:
        total, points, mark = self._total, self._points, self.separator
        while len(points) > 1 and total.batches - points[1].batches >= self.window_size:
            points.popleft()
        first, world_size = points[0], trainer.world_size
        points.append(replace(total))
        seconds = max(total.seconds - first.seconds, 1e-9)
        rates = {
            "batches": total.batches - first.batches,
            "samples": total.samples - first.samples,
            "items": total.items - first.items,
            "flops": total.flops - first.flops,
        }
        values = {"time": total.seconds, "batches": float(total.batches), "samples": total.samples}
        if self.length_fn is not None:
            values["lengths"] = total.items
        for name, count in rates.items():
            if count or name in ("batches", "samples"):
                values[f"device{mark}{name}_per_sec"] = count / seconds
                if world_size > 1:
                    values[f"{name}_per_sec"] = count / seconds * world_size
        if self.available_flops and rates["flops"]:
            values[f"device{mark}mfu"] = rates["flops"] / seconds / self.available_flops
        for name, value in values.items():
            module.log(f"train{mark}{name}", value, on_step=True, on_epoch=False)
