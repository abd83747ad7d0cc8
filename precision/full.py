"""One dtype for everything, with its full width: fp32 and fp64."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from trivet.plugins import Needs, Policy, Precision
from trivet.precision.casting import cast_floating
from trivet.precision.default_dtype import DefaultDtype


class FP32(Precision):
    """float32 for storage, compute and reduction; batches are left alone."""

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:float32"}))

    @property
    def policy(self) -> Policy:
        return Policy(param=torch.float32, compute=torch.float32, reduce=torch.float32)


class FP64(Precision):
    """float64 for storage, compute and reduction; batches, and tensors made inside the step, are float64 too."""

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:float64"}))

    @property
    def policy(self) -> Policy:
        return Policy(param=torch.float64, compute=torch.float64, reduce=torch.float64)

    def cast_batch(self, batch: Any) -> Any:
        return cast_floating(batch, torch.float64)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return DefaultDtype(torch.float64)
