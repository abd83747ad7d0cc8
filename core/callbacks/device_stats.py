"""DeviceStatsMonitor: memory and utilisation of the device, beside the metrics of the same update."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .callback import Callback

if TYPE_CHECKING:
    from ..module import Module
    from ..trainer import Trainer


class DeviceStatsMonitor(Callback):
    """Logs what the accelerator's ``memory()`` and ``stats()`` say, as ``DeviceStatsMonitor.on_train_batch_end/...``.

    The device is asked once for each row of ``log_every_n_steps``, after the row's update; other updates cost one
    comparison. Rank 0's device is the one that loggers see.

    Args:
        cpu_stats: log ``cpu_percent``, ``cpu_vm_percent`` and ``cpu_swap_percent`` of the machine, which needs psutil.
            By default where training runs on the CPU and psutil is installed; False never logs anything of a CPU.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        if cpu_stats and importlib.util.find_spec("psutil") is None:
            raise ConfigurationError("DeviceStatsMonitor(cpu_stats=True) needs psutil: pip install psutil.")
        self.cpu_stats = cpu_stats
        self._seen = -1
        self._device = self._cpu = False

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._seen = trainer.progress.update
        on_cpu = trainer.engine.device.type == "cpu"
        self._device = not (on_cpu and self.cpu_stats is False)
        wanted = on_cpu and importlib.util.find_spec("psutil") is not None if self.cpu_stats is None else self.cpu_stats
        self._cpu = bool(wanted)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        update = trainer.progress.update
        if update == self._seen or update % trainer.log_every_n_steps:
            return
        self._seen = update
        accelerator = trainer.engine.accelerator
        found: dict[str, float] = {**accelerator.memory(), **accelerator.stats()} if self._device else {}
        if self._cpu:
            found |= cpu_stats()
        for name, value in found.items():
            text = f"{type(self).__qualname__}.on_train_batch_end/{name}"
            module.log(text, float(value), on_step=True, on_epoch=False)


def cpu_stats() -> dict[str, float]:
    """Load and memory of the machine, in percent. Needs psutil."""
    psutil = importlib.import_module("psutil")
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
