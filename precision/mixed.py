"""float32 storage and reduction, compute in a 16-bit dtype through `torch.autocast`: bf16-mixed and fp16-mixed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from trivet.errors import ConfigurationError
from trivet.plugins import Needs, Policy, Precision, Scaling


class BF16Mixed(Precision):
    """Matrix products in bfloat16; parameters, optimizer state and gradients in float32."""

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:float32", "dtype:bfloat16", "autocast:bfloat16"}))

    @property
    def policy(self) -> Policy:
        return Policy(param=torch.float32, compute=torch.bfloat16, reduce=torch.float32)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, torch.bfloat16)


class FP16Mixed(Precision):
    """Matrix products in float16, with dynamic loss scaling; parameters, optimizer state and gradients in float32.

    The options are those of `trivet.plugins.Scaling`: the first scale, its factor after ``interval`` updates without
    overflow, and its factor after an overflow.
    """

    def __init__(
        self, *, initial: float = 65536.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        if not (initial > 0 and growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise ConfigurationError(
                f"fp16-mixed got initial={initial!r}, growth={growth!r}, backoff={backoff!r}, interval={interval!r}. "
                "Expected initial > 0, growth > 1, 0 < backoff < 1 and interval >= 1."
            )
        self.initial, self.growth, self.backoff, self.interval = initial, growth, backoff, interval

    @property
    def needs(self) -> Needs:
        return Needs(
            strategy=frozenset({"loss_scaling"}),
            accelerator=frozenset({"dtype:float32", "dtype:float16", "autocast:float16"}),
        )

    @property
    def policy(self) -> Policy:
        return Policy(param=torch.float32, compute=torch.float16, reduce=torch.float32)

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.initial, self.growth, self.backoff, self.interval)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, torch.float16)
