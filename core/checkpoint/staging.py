"""DCP's asynchronous save: tensors are copied into buffers that stay, and written from there by a thread of DCP's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.tensor import DTensor

from .files import Place
from .tensors import ALL, ALONE, Finish, Planner, Writer


class Buffers(AsyncStager):
    """Copies of tensors in the memory of the host, pinned where they come from an accelerator.

    A buffer is used again when a tensor of its name, shape and dtype comes again: what costs most about a copy is the
    memory that was never touched before. A `DTensor` is staged as this rank's part.
    """

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}
        self.failure: Exception | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False  # `stage` returns when everything is copied

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What DCP's plan is made of: each tensor's shape and dtype, and the buffers in place of plain tensors."""
        self.failure = None
        try:
            kept, self.of = self.of, {}
            places: dict[Any, Tensor] = {}  # tied tensors have one buffer
            tensors = state_dict[ALL]
            staged = {name: self._copy(name, tensor, kept, places) for name, tensor in tensors.items()}
            if any(tensor.device.type != "cpu" for tensor in tensors.values()):
                torch.accelerator.synchronize()
        except Exception as error:  # of this rank alone: the plan tells the others, who wait for it
            self.failure, self.of, staged = error, {}, {}
        return {ALL: staged}

    def synchronize_staging(self) -> None:
        return None  # nothing is left to wait for

    def close(self) -> None:
        self.of = {}

    def _copy(self, name: str, tensor: Tensor, kept: dict[str, Tensor], places: dict[Any, Tensor]) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = (local.data_ptr(), local.device, local.dtype, local.shape, local.stride())
        buffer = places.get(place) if local.numel() else None
        if buffer is None:
            buffer = kept.get(name)
            if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
                buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.device.type == "cuda")
            buffer.copy_(local, non_blocking=True)
            places[place] = buffer
        self.of[name] = buffer
        if not isinstance(tensor, DTensor):
            return buffer
        # without storage, so that the parts that were copied can be freed or change while the plan lives
        shell = torch.empty_like(local, device="meta")
        return DTensor.from_local(
            shell, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


class _FromBuffers(Planner):
    """The plan of tensors that lie in buffers."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self.buffers, self.begun = buffers, threading.Event()

    def create_local_plan(self) -> SavePlan:
        self.begun.set()
        if self.buffers.failure is not None:
            raise self.buffers.failure
        return super().create_local_plan()

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.buffers.of[index.fqn]


def write_behind(
    directory: Place, tensors: Mapping[str, Tensor], buffers: Buffers, *, group: ProcessGroup | None, finish: Finish
) -> Future[Any]:
    """As `tensors.write`, but it returns when the tensors are copied. ``group`` is for the collectives of the thread;
    without one nothing is collective. The future brings what DCP raised, see `tensors.told`."""
    # nothing is to be copied from a device any more, and a new thread would look for one on the wrong device
    writer, planner = Writer(directory, finish, per_thread_copy_ahead=0), _FromBuffers(buffers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ALONE)
        saving = async_save(
            {ALL: tensors},
            storage_writer=writer,
            planner=planner,
            process_group=group,
            async_stager=buffers,
            no_dist=group is None,
        )
        future = saving.upload_completion if isinstance(saving, AsyncSaveResponse) else saving
        future.add_done_callback(lambda _: planner.begun.set())
        if group is None:
            planner.begun.wait()  # until the thread has warned: filters are no thread's own
    return future
