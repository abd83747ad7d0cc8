"""What a run changes for its whole process, as flags and precision say, and puts back when it ends."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .plugins import Policy
    from .trainer import Trainer

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def products(matmul: str | None) -> Iterator[None]:
    """Products in float32 as `plugins.Policy` says, and convolutions with them, which torch's name leaves out."""
    if matmul is None:
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision(matmul)
    cudnn.allow_tf32 = matmul != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        cudnn.allow_tf32 = before[1]


class Switches:
    """Deterministic algorithms, cuDNN's choice, float32 products, anomaly detection, and the random generators.

    Every random number of a run follows from its seed and a position, so the global generators are seeded many times
    in it; afterwards they stand where the caller left them, and what runs next draws as if the run had not been.
    """

    def __init__(self, trainer: Trainer, policy: Policy) -> None:
        self.trainer, self.policy = trainer, policy
        self.back = ExitStack()

    def __enter__(self) -> None:
        trainer, back = self.trainer, self.back
        cudnn = torch.backends.cudnn
        back.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        back.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        if trainer.deterministic:
            if torch.cuda.is_available() and WORKSPACE not in os.environ:
                os.environ[WORKSPACE] = ":4096:8"  # cuBLAS is deterministic only with a workspace of fixed size
                back.callback(os.environ.pop, WORKSPACE, None)
            torch.use_deterministic_algorithms(True, warn_only=trainer.deterministic == "warn")
            cudnn.benchmark = False
        if trainer.benchmark is not None:
            cudnn.benchmark = trainer.benchmark
        back.enter_context(products(self.policy.matmul))
        if trainer.detect_anomaly:
            back.enter_context(torch.autograd.set_detect_anomaly(True))
        self._keep_generators()

    def __exit__(self, *error: object) -> None:
        self.back.close()

    def _keep_generators(self) -> None:
        self.back.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            import numpy

            self.back.callback(numpy.random.set_state, numpy.random.get_state())
        self.back.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.back.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
