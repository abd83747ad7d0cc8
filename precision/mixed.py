"""float32 storage and reduction, compute in a 16-bit dtype through `torch.autocast`: bf16-mixed and fp16-mixed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from trivet.errors import ConfigurationError
from trivet.plugins import Needs, Policy, Precision, Scaling
from trivet.precision.choices import check_matmul, wire


class BF16Mixed(Precision):
    """Matrix products in bfloat16; parameters and optimizer state in float32.

    Args:
        reduce: the dtype in which gradients are communicated: ``"float32"``, or ``"bfloat16"``, half the bytes.
        matmul: how products that autocast leaves in float32 are made: ``"highest"``, ``"high"`` (TF32 where the device
            has it) or ``"medium"``; None leaves it as the process has it.
    """

    def __init__(self, *, reduce: str = "float32", matmul: str | None = None) -> None:
        self._wire = wire("bf16-mixed", reduce, torch.bfloat16)
        check_matmul("bf16-mixed", matmul)
        self.reduce, self.matmul = reduce, matmul

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"dtype:float32", "dtype:bfloat16", "autocast:bfloat16"}))

    @property
    def policy(self) -> Policy:
        return Policy(torch.float32, torch.bfloat16, self._wire, matmul=self.matmul)

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, torch.bfloat16)


class FP16Mixed(Precision):
    """Matrix products in float16, with dynamic loss scaling; parameters and optimizer state in float32.

    ``initial`` to ``interval`` are those of `trivet.plugins.Scaling`: the first scale, its factor after ``interval``
    updates without overflow, and its factor after an overflow.

    Args:
        initial: the first scale.
        growth: its factor after ``interval`` updates without overflow.
        backoff: its factor after an overflow.
        interval: so many updates.
        scale: whether losses are scaled. Without it gradients below 6e-8 are lost, and an overflow is not noticed.
        reduce: the dtype in which gradients are communicated: ``"float32"``, or ``"float16"``, half the bytes.
        matmul: how products that autocast leaves in float32 are made; see `BF16Mixed`.
    """

    def __init__(
        self,
        *,
        initial: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        scale: bool = True,
        reduce: str = "float32",
        matmul: str | None = None,
    ) -> None:
        if not (initial > 0 and growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise ConfigurationError(
                f"fp16-mixed got initial={initial!r}, growth={growth!r}, backoff={backoff!r}, interval={interval!r}. "
                "Expected initial > 0, growth > 1, 0 < backoff < 1 and interval >= 1."
            )
        self._wire = wire("fp16-mixed", reduce, torch.float16)
        check_matmul("fp16-mixed", matmul)
        self.initial, self.growth, self.backoff, self.interval = initial, growth, backoff, interval
        self.scale, self.reduce, self.matmul = scale, reduce, matmul

    @property
    def needs(self) -> Needs:
        return Needs(
            strategy=frozenset({"loss_scaling"} if self.scale else ()),
            accelerator=frozenset({"dtype:float32", "dtype:float16", "autocast:float16"}),
        )

    @property
    def policy(self) -> Policy:
        return Policy(torch.float32, torch.float16, self._wire, matmul=self.matmul)

    @property
    def scaling(self) -> Scaling | None:
        return Scaling(self.initial, self.growth, self.backoff, self.interval) if self.scale else None

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, torch.float16)
