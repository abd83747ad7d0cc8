"""The suites again with ``accelerator="cuda"``: every strategy and precision on one device, and on two where they are.

Without a CUDA device nothing is run. ``python tests/device/run.py`` runs this and the benchmark, and prints one table.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from trivet import registry
from trivet.accelerators.cuda import CUDA
from trivet.testing import AcceleratorSuite, PrecisionSuite, Tolerance, cells

if not CUDA().is_available():
    pytest.skip(f"no CUDA device: {CUDA().unavailable_reason()}", allow_module_level=True)

SIZES = (1, 2) if CUDA().device_count() > 1 else (1,)
EXACT = ("fp32", "fp64", "bf16-true", "fp16-true")


class TestCUDA(AcceleratorSuite):
    """Every strategy and precision that can be used here."""

    plugin = "cuda"
    precisions = EXACT
    world_sizes = SIZES
    timeout_s = 120.0  # a context, and kernels that are loaded when first used


class TestCUDAMixed(TestCUDA):
    """The reference is computed on the CPU: what is added up in another order may be rounded the other way."""

    plugin = "cuda"
    precisions = tuple(name for name in cells.own("precision") if name not in EXACT)
    tolerance = Tolerance(first_loss=5e-4, losses=2e-3, gradients=2e-2)


if find_spec("torchao") is not None:

    class TestFloat8(PrecisionSuite):
        """Every layer in float8, emulated: the suite's layers are too small for the device's products."""

        plugin = {"name": "fp8-mixed", "emulate": True, "smallest": 1, "multiple_of": 1}  # noqa: RUF012
        strategies = ("single", "ddp", "fsdp", "zero2")
        accelerators = ("cuda",)
        world_sizes = SIZES
        tolerance = Tolerance(first_loss=1e-2, losses=3e-2, gradients=0.3)

    @pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="the device does not multiply float8")
    @pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    def test_the_device_multiplies_what_is_emulated(recipe: str) -> None:
        outputs = []
        for emulate in (True, False):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
            options = {"name": "fp8-mixed", "smallest": 16, "recipe": recipe, "emulate": emulate}
            precision = registry.make("precision", options).plugin
            with precision.forward_context("cuda"):
                net = precision.convert(net).cuda()
                output = net(torch.randn(64, 256).cuda())
            output.float().pow(2).mean().backward()
            outputs.append((output.float(), net[0].weight.grad))
        for emulated, real in zip(*outputs, strict=True):
            assert (real - emulated).norm() < 0.02 * emulated.norm()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_leaves_in_float32_what_its_table_says(low: torch.dtype) -> None:
    x, target = torch.randn(8, 16, device="cuda", dtype=low), torch.randn(8, 16, device="cuda")
    layer, norm = nn.Linear(16, 16).cuda(), nn.LayerNorm(16).cuda()
    name = "bf16-mixed" if low == torch.bfloat16 else "fp16-mixed"
    with registry.make("precision", name).plugin.forward_context("cuda"):
        assert layer(x).dtype == low
        wide = {
            "softmax": x.softmax(-1), "log_softmax": x.log_softmax(-1), "layer_norm": norm(x),
            "group_norm": nn.functional.group_norm(x, 2), "mse_loss": nn.functional.mse_loss(x, target),
            "cross_entropy": nn.functional.cross_entropy(x, target.argmax(-1)), "exp": x.exp(), "norm": x.norm(),
        }  # fmt: skip
    assert {op: out.dtype for op, out in wide.items() if out.dtype != torch.float32} == {}
