"""A 16-bit dtype for storage, compute and reduction: bf16-true and fp16-true."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from trivet.plugins import Needs, Policy, Precision
from trivet.precision.casting import cast_floating
from trivet.precision.default_dtype import DefaultDtype


class BF16True(Precision):
    """Everything in bfloat16, optimizer state included; half the memory of fp32."""

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:bfloat16"}))

    @property
    def policy(self) -> Policy:
        return Policy(param=torch.bfloat16, compute=torch.bfloat16, reduce=torch.bfloat16)

    def cast_batch(self, batch: Any) -> Any:
        return cast_floating(batch, torch.bfloat16)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return DefaultDtype(torch.bfloat16)


class FP16True(Precision):
    """Everything in float16, optimizer state included, without loss scaling: small gradients become zero."""

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:float16"}))

    @property
    def policy(self) -> Policy:
        return Policy(param=torch.float16, compute=torch.float16, reduce=torch.float16)

    def cast_batch(self, batch: Any) -> Any:
        return cast_floating(batch, torch.float16)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return DefaultDtype(torch.float16)
