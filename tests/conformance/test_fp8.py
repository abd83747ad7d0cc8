"""fp8-mixed with every layer in float8, which its defaults leave alone in a net as small as the suite's."""

from __future__ import annotations

from importlib.util import find_spec

from trivet.testing import PrecisionSuite, Tolerance

if find_spec("torchao") is not None:

    class TestEveryLayerInFloat8(PrecisionSuite):
        """The reference knows bfloat16; float8 has three or two bits for the digits instead of seven."""

        plugin = {"name": "fp8-mixed", "smallest": 1, "multiple_of": 1}  # noqa: RUF012
        strategies = ("single", "ddp", "fsdp", "zero2")
        world_sizes = (1, 2)
        tolerance = Tolerance(first_loss=1e-2, losses=3e-2, gradients=0.3)
