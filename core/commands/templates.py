"""The files that ``trivet plugins new`` writes, as `string.Template`s."""

from __future__ import annotations

SUITES = {"strategy": "StrategySuite", "accelerator": "AcceleratorSuite", "precision": "PrecisionSuite"}

PYPROJECT = """\
[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[project]
name = "$distribution"
version = "0.1.0"
description = "The $kind $name for Trivet."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["trivet>=$version"]

[project.optional-dependencies]
test = ["trivet[testing]"]

[project.entry-points."$group"]
$name = "$module:$cls"

[tool.setuptools]
py-modules = ["$module"]
"""

README = """\
# $distribution

The $kind `$name` for Trivet.

    pip install -e '.[test]'

- `pytest`: every conformance check, beside all of Trivet's own plugins
- `trivet plugins $kind --check`: lists it, with what it needs and offers
- `trivet fit --$kind $name --help`: shows its options
"""

TEST = """\
\"\"\"Trivet's conformance suite. For one in a hurry: pytest --trivet-cells=cover.\"\"\"

from trivet.testing import $suite


class Test$cls($suite):
    plugin = "$name"
"""

STRATEGY = '''\
"""The strategy $name: data parallelism by one all-reduce for each gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from trivet.plugins import Strategy


class $cls(Strategy):
    """Every rank holds everything; gradients are averaged when the optimizer steps."""

    interface: ClassVar[int] = 1  # that of trivet.plugins which this was written for

    # Arguments of a constructor are options: --strategy.NAME on the command line, kept in checkpoints. Keep each as an
    # attribute of the same name.
    #
    # What is not overridden does what its docstring says. `needs` and `offers` are capability names: state what this
    # strategy wants of an accelerator, and take out of `offers` what it cannot do. Then that is refused before launch.

    def reduce_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called on all ranks, at the step. TODO: the communication of your own, in place of this loop."""
        world_size = self.context.world.world_size
        params = [param for param in parameters if param.requires_grad]
        if world_size == 1 or not params:
            return
        # Ranks may have used different parameters, but have to take part in the same collectives.
        used = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8, device=self.context.device)
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for param, anywhere in zip(params, used.tolist(), strict=True):
            if not anywhere:
                continue
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            # What is sent has the precision's dtype for it, divided before the sum, which float16 might not hold.
            sent = param.grad.to(self.context.policy.reduce).div_(world_size)
            dist.all_reduce(sent)
            param.grad.copy_(sent)
'''

ACCELERATOR = '''\
"""The accelerator $name: stands for a device by tensors of the CPU, so that it can be tried anywhere."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from trivet.plugins import Accelerator


class $cls(Accelerator):
    """TODO: what kind of device, and what it takes to have one."""

    interface: ClassVar[int] = 1  # that of trivet.plugins which this was written for
    device_type: ClassVar[str] = "cpu"  # TODO: what torch calls it
    collective_backend: ClassVar[str | None] = "gloo"  # TODO: None where there is none

    # Arguments of a constructor are options: --accelerator.NAME on the command line, kept in checkpoints. Keep each as
    # an attribute of the same name.

    # These four run in the process that launches: none of them may create a device context.

    @property
    def offers(self) -> frozenset[str]:
        """TODO: dtypes that can be stored, dtypes that torch.autocast can compute in, and more; offer what works."""
        dtypes = {"dtype:float32", "dtype:float64", "dtype:bfloat16", "dtype:float16"}
        return frozenset(dtypes | {"autocast:bfloat16", "autocast:float16", "collectives", "shared_devices"})

    def is_available(self) -> bool:
        """TODO: whether this machine has such a device. `unavailable_reason` is the sentence for a no."""
        return True

    def device_count(self) -> int:
        """TODO: how many processes can have a device of their own; "shared_devices" in `offers` allows for more."""
        return os.cpu_count() or 1

    # What follows runs in each process that trains.

    def device(self, local_rank: int) -> torch.device:
        """TODO: such as torch.device("mine", local_rank)."""
        return torch.device("cpu")

    def setup(self, device: torch.device) -> None:
        """TODO: make it current. `teardown` is its reverse, and is called after exceptions, too."""

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """The default moves every tensor of a nested batch. TODO: what your device wants beside that."""
        return super().to_device(batch, device)

    def seed(self, seed: int) -> None:
        """TODO: seed the device's own random generator; the CPU's are seeded already."""
'''

PRECISION = '''\
"""The precision $name: products in bfloat16, everything that lasts in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from trivet.plugins import Needs, Policy, Precision


class $cls(Precision):
    """Matrix products in bfloat16; parameters, optimizer state and gradients in float32."""

    interface: ClassVar[int] = 1  # that of trivet.plugins which this was written for

    # Arguments of a constructor are options: --precision.NAME on the command line, kept in checkpoints. Keep each as an
    # attribute of the same name.

    @property
    def needs(self) -> Needs:
        """TODO: what an accelerator has to offer for this; "loss_scaling" of the strategy where `scaling` is used."""
        return Needs(accelerator=frozenset({"dtype:float32", "dtype:bfloat16", "autocast:bfloat16"}))

    @property
    def policy(self) -> Policy:
        """TODO: the dtypes. They are printed before launch, and compared with what happens in the first update."""
        return Policy(param=torch.float32, compute=torch.bfloat16, reduce=torch.float32)

    # `convert` changes the module once, before it is laid out: its default casts parameters to `policy.param`. Override
    # it to exchange layers. `cast_batch` casts each batch.

    def forward_context(self, device_type: str) -> AbstractContextManager[Any] | None:
        """What is entered around each step. TODO: None where layers and batches have the dtype themselves."""
        return torch.autocast(device_type, torch.bfloat16)
'''

_MODULES = {"strategy": STRATEGY, "accelerator": ACCELERATOR, "precision": PRECISION}

# What is written for each kind: names of files, and their contents.
FILES = {
    kind: {"pyproject.toml": PYPROJECT, "README.md": README, "$module.py": module, "test_$module.py": TEST}
    for kind, module in _MODULES.items()
}
