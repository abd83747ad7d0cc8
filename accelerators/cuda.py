"""CUDA devices (and ROCm's, which PyTorch gives the same names): collectives by NCCL."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, ClassVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from trivet.errors import ConfigurationError
from trivet.plugins import Accelerator


class CUDA(Accelerator):
    """The devices that ``CUDA_VISIBLE_DEVICES`` leaves visible; a process's local rank is an ordinal among them.

    ``pin_memory``: copy batches that are not in pinned memory there first, so that their transfer is asynchronous. A
    copy from pageable memory waits until the device has done all earlier work (CUDA Runtime API, "API synchronization
    behavior"), which would be one host synchronisation per batch.

    bfloat16 is offered on every device: those that the supported PyTorch builds run on compute it, below compute
    capability 8.0 by slow emulation. Asking the device which it is would create a context in the launching process.
    """

    device_type: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str | None] = "nccl"

    def __init__(self, *, pin_memory: bool = True) -> None:
        self.pin_memory = pin_memory

    @property
    def offers(self) -> frozenset[str]:
        dtypes = {"dtype:float32", "dtype:float64", "dtype:bfloat16", "dtype:float16"}
        offered = dtypes | {"autocast:bfloat16", "autocast:float16", "float8"}
        offered |= {"device_ids", "native_kernels", "kernels:cuda"}
        # A PyTorch without CUDA has no NCCL either; that is one reason for a refusal, not two.
        if not torch.backends.cuda.is_built() or (  # type: ignore[no-untyped-call]
            torch.distributed.is_available() and torch.distributed.is_nccl_available()
        ):
            offered |= {"collectives", "collectives:float8"}
        return frozenset(offered)

    def is_available(self) -> bool:
        # Not torch.cuda.is_available(): unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set, that initialises the driver,
        # after which a forked process cannot use CUDA. With the variable set it is what stands here.
        return self.device_count() > 0

    def device_count(self) -> int:
        # Counted through NVML as long as CUDA is not initialised: no context, and CUDA_VISIBLE_DEVICES is respected.
        return torch.cuda.device_count()

    def unavailable_reason(self) -> str:
        if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            return f"this PyTorch build ({torch.__version__}) has no CUDA; install one that has (https://pytorch.org/get-started)"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return f"no CUDA device is visible with CUDA_VISIBLE_DEVICES={visible!r}"
        return (
            "PyTorch has CUDA, but no device is visible; CUDA_VISIBLE_DEVICES is not set: look at what nvidia-smi lists"
        )

    def device(self, local_rank: int) -> torch.device:
        """The visible device with this ordinal."""
        if not 0 <= local_rank < (count := self.device_count()):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise ConfigurationError(
                f"local rank {local_rank} has no CUDA device: {count} visible (CUDA_VISIBLE_DEVICES={visible!r}). "
                "Start at most as many processes on this node as devices are visible."
            )
        return torch.device("cuda", local_rank)

    def setup(self, device: torch.device) -> None:
        """Make the device current and start its peak memory count anew. The context is created here."""
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)

    def teardown(self) -> None:
        """Give cached memory back to the driver; a process that never used the device is left alone."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Move every tensor, without waiting for it."""

        def move(tensor: Tensor) -> Tensor:
            if self.pin_memory and tensor.device.type == "cpu" and tensor.layout == torch.strided:
                tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
            return tensor.to(device, non_blocking=True)

        return apply_to_collection(batch, Tensor, move)

    def seed(self, seed: int) -> None:
        """Seed the current device's generator. Queued until CUDA is initialised; never synchronises."""
        torch.cuda.manual_seed(seed)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes of the current device: in tensors now and at most since `setup`, and held by the caching allocator."""
        return {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }

    def stats(self) -> dict[str, float]:
        """Utilisation, temperature and power of the current device; empty where nvidia-ml-py is not installed."""
        if importlib.util.find_spec("pynvml") is None:
            return {}
        return {
            "utilization_percent": float(torch.cuda.utilization()),
            "temperature_celsius": float(torch.cuda.temperature()),
            "power_watts": torch.cuda.power_draw() / 1000,
        }
