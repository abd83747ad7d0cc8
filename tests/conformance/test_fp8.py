"""fp8-mixed with every layer in float8, which its defaults leave alone in a net as small as the suite's.

With TRIVET_CI_FULL=1 under all of these strategies on one and two processes, else under fsdp on two.
"""

from __future__ import annotations

from importlib.util import find_spec

from full import FULL
from trivet.testing import PrecisionSuite, Tolerance

if find_spec("torchao") is not None:

    class TestEveryLayerInFloat8(PrecisionSuite):
        """The reference knows bfloat16; float8 has three or two bits for the digits instead of seven."""

        plugin = {"name": "fp8-mixed", "smallest": 1, "multiple_of": 1}  # noqa: RUF012
        strategies = ("single", "ddp", "fsdp", "zero2") if FULL else ("fsdp",)
        world_sizes = (1, 2) if FULL else (2,)
        tolerance = Tolerance(first_loss=1e-2, losses=3e-2, gradients=0.3)
