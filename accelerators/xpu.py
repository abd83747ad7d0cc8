"""Intel's GPUs, through `torch.accelerator`: collectives by XCCL. Written without one at hand: never run on one yet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

import torch
from trivet.errors import ConfigurationError
from trivet.plugins import Accelerator

MASK = "ZE_AFFINITY_MASK"

REASONS = {
    "dtype:float64": "Many of Intel's GPUs have no float64, and asking one makes a context on it.",
    "float8": "Nobody has tried float8 on Intel's GPUs with Trivet.",
    "collectives": "This PyTorch build has no XCCL, which connects processes on Intel's GPUs.",
}


class XPU(Accelerator):
    """The devices that ``ZE_AFFINITY_MASK`` leaves visible; a process's local rank is an ordinal among them."""

    device_type: ClassVar[str] = "xpu"
    collective_backend: ClassVar[str | None] = "xccl"
    reasons: Mapping[str, str] = REASONS

    @property
    def offers(self) -> frozenset[str]:
        dtypes = {"dtype:float32", "dtype:bfloat16", "dtype:float16", "autocast:bfloat16", "autocast:float16"}
        offered = dtypes | {"device_ids", "native_kernels"}
        if torch.distributed.is_available() and torch.distributed.is_xccl_available():
            offered.add("collectives")
        return frozenset(offered)

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return torch.xpu.device_count()

    def unavailable_reason(self) -> str:
        if not hasattr(torch.version, "xpu") or torch.version.xpu is None:
            return f"this PyTorch build ({torch.__version__}) has no XPU; install one that has (https://pytorch.org/get-started)"
        return f"PyTorch has XPU, but no device is visible ({MASK}={os.environ.get(MASK)!r})"

    def device(self, local_rank: int) -> torch.device:
        if not 0 <= local_rank < (count := self.device_count()):
            raise ConfigurationError(
                f"local rank {local_rank} has no XPU device: {count} visible ({MASK}={os.environ.get(MASK)!r}). "
                "Start at most as many processes on this node as devices are visible."
            )
        return torch.device("xpu", local_rank)

    def setup(self, device: torch.device) -> None:
        """Make the device current and start its peak memory count anew. The context is created here."""
        torch.accelerator.set_device_index(device.index)
        torch.accelerator.reset_peak_memory_stats()

    def teardown(self) -> None:
        """Give cached memory back to the driver; a process that never used the device is left alone."""
        if torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
            torch.accelerator.empty_cache()

    def seed(self, seed: int) -> None:
        torch.xpu.manual_seed(seed)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes of the current device: in tensors now and at most since `setup`, and held by the caching allocator."""
        return {
            "allocated": torch.accelerator.memory_allocated(),
            "peak": torch.accelerator.max_memory_allocated(),
            "reserved": torch.accelerator.memory_reserved(),
        }
