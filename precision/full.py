"""One dtype for everything, with its full width: fp32 and fp64."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from trivet.plugins import Needs, Policy, Precision
from trivet.precision.casting import cast_floating
from trivet.precision.choices import check_matmul
from trivet.precision.default_dtype import DefaultDtype


class FP32(Precision):
    """float32 for storage, compute and reduction; batches are left alone.

    Args:
        matmul: how products are made: ``"highest"``, ``"high"`` (TF32 where the device has it, three bits of digits
            more than bfloat16), or ``"medium"`` (bfloat16); convolutions use TF32 unless it is ``"highest"``. None
            leaves both as the process has them: in torch products in float32 and convolutions in TF32.
    """

    def __init__(self, *, matmul: str | None = None) -> None:
        check_matmul("fp32", matmul)
        self.matmul = matmul

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:float32"}))

    @property
    def policy(self) -> Policy:
        return Policy(torch.float32, torch.float32, torch.float32, matmul=self.matmul)


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
