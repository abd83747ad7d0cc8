"""What is put around DeepSpeed's engine, and how the package is loaded."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from trivet.errors import ConfigurationError

# DeepSpeed compiles it on its first use, and needs it for inference only
SHARED_MEMORY_OP = "deepspeed_shm_comm"


class Root(nn.Module):
    """What training calls: the step until DeepSpeed's engine is built around it, then that."""

    _call: Callable[..., Any]

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step
        self.enter(step)

    def enter(self, call: nn.Module) -> None:
        object.__setattr__(self, "_call", call)  # no submodule: the engine holds the step itself

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class Loss(Tensor):
    """A loss whose backward is DeepSpeed's."""

    engine: Any

    def through(self, engine: Any) -> Loss:
        self.engine = engine
        return self

    def backward(self, *args: Any, **options: Any) -> None:
        self.engine.backward(self.as_subclass(Tensor), *args, scale_wrt_gas=False, **options)


@contextmanager
def imports() -> Iterator[None]:
    """Where DeepSpeed imports its modules, some of them late: they use what torch has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
        yield


def load(device_type: str) -> Any:
    """DeepSpeed, for this kind of device, without what it would compile and never use."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # it would look for a GPU first
        if shutil.which("ninja") is None:  # which it was installed with, for what it compiles on demand
            os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with imports():
        import deepspeed
        import deepspeed.accelerator

    chosen = deepspeed.accelerator.get_accelerator().device_name()
    if chosen != device_type:
        raise ConfigurationError(
            f"DeepSpeed works on {chosen!r} in this process, and the run's device is {device_type!r}. Set "
            f"DS_ACCELERATOR={device_type} before deepspeed is imported."
        )
    if device_type == "cpu":
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):  # torch 2.13's new names, warned of at every call
        warnings.filterwarnings("ignore", f".torch.distributed.{name}. is deprecated", FutureWarning)
    return deepspeed
