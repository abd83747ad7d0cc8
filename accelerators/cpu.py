"""The CPU: collectives by gloo, several processes on the same cores."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from trivet.plugins import Accelerator


class CPU(Accelerator):
    """The machine's cores. More processes than cores are allowed, since they share them (``shared_devices``)."""

    device_type: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str | None] = "gloo"
    moves_batches: ClassVar[bool] = False

    @property
    def offers(self) -> frozenset[str]:
        dtypes = {"dtype:float32", "dtype:float64", "dtype:bfloat16", "dtype:float16"}
        offered = dtypes | {"autocast:bfloat16", "autocast:float16", "float8", "native_kernels", "shared_devices"}
        if torch.distributed.is_available() and torch.distributed.is_gloo_available():
            offered.add("collectives")
        return frozenset(offered)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        """The cores that this process may run on."""
        if sys.platform == "linux":
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """The batch itself: it is there already."""
        return batch

    def memory(self) -> dict[str, int]:
        """Resident bytes of this process now (``allocated``, Linux only) and at most so far (``peak``)."""
        status = Path("/proc/self/status")
        if status.exists():
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            found = {"allocated": fields.get("VmRSS"), "peak": fields.get("VmHWM")}
            return {key: int(value.split()[0]) * 1024 for key, value in found.items() if value}
        if sys.platform == "win32":
            return {}
        import resource

        # The unit of ru_maxrss is bytes on macOS and KiB elsewhere (getrusage(2)).
        unit = 1 if sys.platform == "darwin" else 1024
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}

    def stats(self) -> dict[str, float]:
        """Load of the whole machine: processes that ran or waited for a core, averaged over the last minute."""
        if sys.platform == "win32":
            return {}
        return {"load_1min": os.getloadavg()[0]}
