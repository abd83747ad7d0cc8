"""CUDA devices (and ROCm's, which PyTorch gives the same names): collectives by NCCL."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from trivet.errors import ConfigurationError
from trivet.plugins import Accelerator

# What NCCL's watchdog does where a collective failed or took longer than the time-out: torch's own default is "leave".
ERRORS = {"none": "0", "abort": "1", "clean_up": "2", "leave": "3"}
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class CUDA(Accelerator):
    """The devices that ``CUDA_VISIBLE_DEVICES`` leaves visible; a process's local rank is an ordinal among them.

    bfloat16 is offered on every device: those that the supported PyTorch builds run on compute it, below compute
    capability 8.0 by slow emulation. Asking the device which it is would create a context in the launching process.

    Args:
        pin_memory: copy batches that are not in pinned memory there first, so that their transfer is asynchronous. A
            copy from pageable memory waits until the device has done all earlier work (CUDA Runtime API, "API
            synchronization behavior"), which would be one host synchronisation per batch.
        copy_stream: transfer batches on a stream of their own, beside what the device still computes.
        prefetch: read the batches of the next update, and begin to transfer the first, on that stream, before the
            update before it is started. One batch more is in the device's memory, and those of one update more in the
            host's: an epoch's first update waits until those of two are read, and those read last are not used where
            training stops within an epoch. Not where somebody overrides `to_device` or a hook of the transfer, nor for
            data that each rank reads for itself, or that is combined of several loaders.
        cudnn_benchmark: let cuDNN try algorithms for each new shape and keep the fastest; `Trainer` has a flag of the
            same meaning, which rules. None leaves it as the process has it.
        nccl_errors: what ends a process when a collective failed or timed out: ``"leave"`` ends it at once, ``"abort"``
            aborts the communicators first, ``"clean_up"`` aborts them and lets the process live, ``"none"`` does
            nothing. None leaves it to ``TORCH_NCCL_ASYNC_ERROR_HANDLING``, and so to torch: ``"leave"``.
    """

    device_type: ClassVar[str] = "cuda"
    collective_backend: ClassVar[str | None] = "nccl"

    def __init__(
        self,
        *,
        pin_memory: bool = True,
        copy_stream: bool = True,
        prefetch: bool = True,
        cudnn_benchmark: bool | None = None,
        nccl_errors: str | None = None,
    ) -> None:
        if nccl_errors not in (None, *ERRORS):
            raise ConfigurationError(
                f"cuda: nccl_errors={nccl_errors!r} is unknown; allowed are {', '.join(ERRORS)}, and None."
            )
        self.pin_memory = pin_memory
        self.copy_stream = copy_stream
        self.prefetch = prefetch
        self.cudnn_benchmark = cudnn_benchmark
        self.nccl_errors = nccl_errors
        self._copies: torch.cuda.Stream | None = None
        self._before: dict[str, Any] = {}  # what `setup` changed of the process

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
        if self.copy_stream:
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            own = type(self).to_device is not CUDA.to_device  # a subclass's way, which looking ahead would pass by
            self.ahead = self._begun if self.prefetch and not own else None
        if self.cudnn_benchmark is not None:
            self._before["benchmark"] = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = self.cudnn_benchmark
        if self.nccl_errors is not None:  # read when the process group is made, which comes after this
            self._before[HANDLING] = os.environ.get(HANDLING)
            os.environ[HANDLING] = ERRORS[self.nccl_errors]

    def teardown(self) -> None:
        """Give cached memory back to the driver, and put back what `setup` changed; a process that never used the
        device is left alone."""
        self._copies = self.ahead = None
        if "benchmark" in self._before:
            torch.backends.cudnn.benchmark = self._before.pop("benchmark")
        if HANDLING in self._before:
            before = self._before.pop(HANDLING)
            os.environ.pop(HANDLING, None)
            os.environ.update({} if before is None else {HANDLING: before})
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Move every tensor, without waiting for it: on the copies' own stream, for which what computes next waits."""
        if self._copies is not None:
            return self._begun(batch, device)()
        return apply_to_collection(batch, Tensor, lambda tensor: self._pinned(tensor).to(device, non_blocking=True))

    def _begun(self, batch: Any, device: torch.device) -> Callable[[], Any]:
        """Begin to move every tensor, on the copies' own stream. Called, the answer gives them to the current stream,
        which waits for them, and not for what is copied after them."""
        copies, sent = self._copies, list[Tensor]()
        assert copies is not None

        def move(tensor: Tensor) -> Tensor:
            if tensor.layout != torch.strided:  # whose memory cannot be said to be used by another stream
                return tensor.to(device, non_blocking=True)
            with torch.cuda.stream(copies):
                moved = self._pinned(tensor).to(device, non_blocking=True)
            if moved is not tensor:
                sent.append(moved)
            return moved

        moved = apply_to_collection(batch, Tensor, move)
        arrived = copies.record_event()

        def given() -> Any:
            computes = torch.cuda.current_stream(device)
            computes.wait_event(arrived)
            for tensor in sent:
                tensor.record_stream(computes)  # or its memory could be given to the next copy while it is read
            return moved

        return given

    def _pinned(self, tensor: Tensor) -> Tensor:
        if not self.pin_memory or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def seed(self, seed: int) -> None:
        """Seed the current device's generator. Queued until CUDA is initialised; never synchronises."""
        torch.cuda.manual_seed(seed)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory(self) -> dict[str, int]:
        """Bytes of the current device: in tensors now and at most since `setup`, and held by the caching allocator, now
        and at most; and how often it had to give memory back to the driver before it got what it asked for."""
        return {
            "allocated": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "retries": int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
        }

    def stats(self) -> dict[str, float]:
        """Utilisation, temperature, power and clock of the current device; empty without nvidia-ml-py."""
        if importlib.util.find_spec("pynvml") is None:
            return {}
        return {
            "utilization_percent": float(torch.cuda.utilization()),
            "memory_utilization_percent": float(torch.cuda.memory_usage()),
            "temperature_celsius": float(torch.cuda.temperature()),
            "power_watts": torch.cuda.power_draw() / 1000,
            "clock_megahertz": float(torch.cuda.clock_rate()),
        }
