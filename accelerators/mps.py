"""The GPU of Apple's chips, through Metal. Written without such a machine at hand: never run on one yet."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

import torch
from trivet.errors import ConfigurationError
from trivet.plugins import Accelerator

REASONS = {
    "collectives": "No backend connects processes on Apple's GPUs: one process, or --accelerator cpu.",
    "dtype:float64": "Metal has no float64: --precision fp32, or --accelerator cpu.",
    "float8": "Metal has no float8.",
    "native_kernels": "Libraries' compiled operators are not for Metal.",
}


class MPS(Accelerator):
    """The one GPU of the machine, for one process. What Metal lacks is refused: float64, several processes."""

    device_type: ClassVar[str] = "mps"
    collective_backend: ClassVar[str | None] = None
    reasons: Mapping[str, str] = REASONS
    _used = False

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"dtype:float32", "dtype:bfloat16", "dtype:float16", "autocast:bfloat16", "autocast:float16"})

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def device_count(self) -> int:
        return 1 if self.is_available() else 0

    def unavailable_reason(self) -> str:
        if sys.platform != "darwin":
            return f"MPS is macOS's, and this is {sys.platform!r}"
        if not torch.backends.mps.is_built():
            return f"this PyTorch build ({torch.__version__}) has no MPS; install one for Apple's chips"
        return "PyTorch has MPS, but Metal found no device; it wants macOS 14 or later on an Apple chip"

    def device(self, local_rank: int) -> torch.device:
        if local_rank:
            raise ConfigurationError(f"local rank {local_rank} has no MPS device: a machine has one, for one process.")
        return torch.device("mps", 0)

    def setup(self, device: torch.device) -> None:
        self._used = True

    def teardown(self) -> None:
        """Give cached memory back; a process that never used the device is left alone."""
        if self._used:
            torch.mps.empty_cache()
        self._used = False

    def seed(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes in tensors, and held by Metal's driver for this process; there is no count of the most so far."""
        return {"allocated": torch.mps.current_allocated_memory(), "reserved": torch.mps.driver_allocated_memory()}
