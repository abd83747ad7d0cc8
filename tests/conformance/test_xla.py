"""XLA through the suites, in an environment of its own; elsewhere all that can be asked is why it is not available.

All strategies are asked, so that each is tried or refused; `test_xla_fsdp` tries the one that wants several devices.
"""

from __future__ import annotations

from trivet.testing import AcceleratorSuite, cells
from trivet.testing.tolerance import Tolerance

# XLA's tanh and products round to bfloat16 in other places than the CPU's, which the reference is computed on: the very
# first loss differs by elements that were rounded the other way.
MIXED = Tolerance(first_loss=5e-4, losses=2e-3, gradients=2e-2)
OTHERS = tuple(name for name in cells.own("precision") if name != "bf16-mixed")
STRATEGIES = tuple(name for name in cells.own("strategy") if name != "xla-fsdp")


class TestXLA(AcceleratorSuite):
    plugin = "xla"
    strategies = STRATEGIES
    precisions = OTHERS
    world_sizes = (1, 2)
    timeout_s = 180.0


class TestXLAMixed(TestXLA):
    plugin = "xla"
    precisions = ("bf16-mixed",)
    tolerance = MIXED
