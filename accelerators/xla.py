"""XLA devices through torch_xla: TPUs, and XLA's own CPU device (``PJRT_DEVICE=CPU``) on which they can be tried."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from trivet.accelerators import xla_autocast
from trivet.errors import ConfigurationError
from trivet.plugins import Accelerator, Needs

PLATFORM = "PJRT_DEVICE"
PLATFORMS = ("CPU", "TPU")
PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"  # the vendor; its network cards have the same
TPUS = ("0x0027", "0x005e", "0x0063", "0x006f", "0x0076")  # v2 and v3, v4, v5e, v6e, 7x; as torch_xla 2.9 knows them

REASONS = {
    "collectives": "torch_xla 2.9 crashes with a second process on XLA's CPU device; on a TPU several are offered. One "
    "process can drive several devices: --strategy xla-fsdp.",
    "lazy_devices": "On XLA nothing is computed before the update ends, and there are no streams, storage or DTensors "
    "of the kind that other strategies are built on.",
    "float8": "torchao's float8 layers were not tried on XLA.",
    "native_kernels": "Libraries' compiled operators are not for XLA.",
    "dtype:float64": "TPUs have no float64.",
    "dtype:float16": "The 16-bit dtype of TPUs is bfloat16.",
    "autocast:float16": "torch's autocast for XLA has bfloat16 alone, which needs no loss scale.",
}

MATMUL = {"highest": "highest", "high": "high", "medium": "default"}  # torch's names and torch_xla's

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # of one batch: dtype and shape of each tensor


class XLA(Accelerator):
    """A device that runs whole updates: what is asked of it is written down, compiled, and started at their end.

    One process has one device, or drives all of them where the strategy lets the compiler shard (``spmd``). Several
    processes, one for each chip, are written for TPUs and UNPROVEN: no test of Trivet has run them, since torch_xla 2.9
    does not survive a second process on its CPU device, where they are therefore refused.

    Float32 matrix products are as `torch.set_float32_matmul_precision` says, also where a precision says it. Left alone
    that is full width, whereas torch_xla by itself rounds their factors to bfloat16 on a TPU.

    ``warm_up``: a new graph is expected in that many updates; later ones are warned about, with their shapes.
    """

    device_type: ClassVar[str] = "xla"
    collective_backend: ClassVar[str | None] = "xla"
    reasons: Mapping[str, str] = REASONS

    def __init__(self, *, warm_up: int = 20) -> None:
        if warm_up < 1:
            raise ConfigurationError(f"xla: warm_up={warm_up!r} must be at least 1 update.")
        self.warm_up = warm_up
        self.graphs = Graphs(warm_up)
        self._matmul = ""  # torch's name of what `seed` set last
        self._products = ""  # torch_xla's name of what the process had before

    # ------------------------------------------------------------------------------------------- before anything runs

    @property
    def needs(self) -> Needs:
        return Needs(strategy=frozenset({"lazy_devices"}))

    @property
    def offers(self) -> frozenset[str]:
        offered = {"dtype:float32", "dtype:bfloat16", "autocast:bfloat16", "spmd"}
        if platform() == "TPU":
            offered.add("collectives")
        elif platform() == "CPU":
            offered.add("dtype:float64")
        return frozenset(offered)

    def is_available(self) -> bool:
        return not self.unavailable_reason()

    def unavailable_reason(self) -> str:
        if importlib.util.find_spec("torch_xla") is None:
            return "the package torch_xla is not installed: pip install 'trivet[xla]'"
        named = os.environ.get(PLATFORM)
        if named is not None and named not in PLATFORMS:
            return f"{PLATFORM}={named!r}; Trivet knows {' and '.join(PLATFORMS)}"
        if platform() is None:
            return f"no TPU was found; {PLATFORM}=CPU in the environment chooses XLA's own CPU device"
        if platform() == "TPU" and not chips():
            return f"{PLATFORM}=TPU, and no TPU was found on the PCI bus"
        return ""

    def device_count(self) -> int:
        """The TPU's chips; one on the CPU, whatever CPU_NUM_DEVICES says, since all of them are one process's."""
        return chips() if platform() == "TPU" else 1

    # ------------------------------------------------------------------------------------ in the process that trains

    def device(self, local_rank: int) -> torch.device:
        """Each process has a chip of its own and calls it ``xla:0``."""
        return torch.device("xla", 0)

    def setup(self, device: torch.device) -> None:
        """Start XLA's runtime, and complete its autocast table."""
        os.environ.setdefault(PLATFORM, platform() or "CPU")
        import torch_xla

        if "spmd" in self.wanted:
            _drive_all()
        elif int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            _join()
        xla_autocast.complete()
        torch_xla.device()
        self.graphs = Graphs(self.warm_up)

    def teardown(self) -> None:
        """Put float32 products back as they were. XLA's runtime and its autocast table stay as long as the process."""
        if self._products:
            _set_products(self._products)
        self._matmul = self._products = ""

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Move every tensor, without waiting, and note the shapes: each new one is a new graph."""
        moved = super().to_device(batch, device)
        self.graphs.note(moved)
        return moved

    def seed(self, seed: int) -> None:
        """Seed the device's generator; the number is an input of the graph, not a part of it. Begins a step."""
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed, "xla:0")
        if (matmul := torch.get_float32_matmul_precision()) != self._matmul:
            self._matmul, before = matmul, _set_products(MATMUL[matmul])
            self._products = self._products or before
        self.graphs.begin()

    def step_boundary(self) -> None:
        """Cut the graph here: it is compiled where it is new, started, and not waited for."""
        import torch_xla

        started = time.monotonic()
        torch_xla.sync()
        self.graphs.end(time.monotonic() - started)

    def synchronize(self) -> None:
        """Start what is pending, and wait for it and for what was started before, for which ``sync`` does not wait."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        torch_xla.sync()
        xm.wait_device_ops()

    def memory(self) -> dict[str, int]:
        """Bytes of the device; nothing on the CPU, whose runtime does not tell."""
        import torch_xla.core.xla_model as xm

        if platform() != "TPU":
            return {}
        found: Any = xm.get_memory_info("xla:0")
        names = {"bytes_used": "allocated", "peak_bytes_used": "peak"}
        return {name: int(found[key]) for key, name in names.items() if key in found}

    def stats(self) -> dict[str, float]:
        """How many graphs were compiled for steps, and how many of them after the warm-up."""
        return {"compiled": float(self.graphs.compiled), "recompiled": float(self.graphs.recompiled)}


def platform() -> str | None:
    """What torch_xla will run on, found without importing it: that takes seconds, and starts a TPU's driver."""
    named = os.environ.get(PLATFORM)
    return named if named is not None else "TPU" if chips() else None


def chips() -> int:
    """The TPU chips of this machine, as the PCI bus lists them."""
    return sum(
        (slot / "vendor").read_text().strip() == GOOGLE and (slot / "device").read_text().strip() in TPUS
        for slot in PCI.glob("*")
    )


def _drive_all() -> None:
    """Make one device of all that XLA has, for the compiler to shard over. Holds for the rest of the process."""
    from torch_xla import runtime

    if runtime.is_spmd():
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch_xla warns that it would copy what is there, and then crashes
            runtime.use_spmd()
    except UserWarning as warning:
        raise ConfigurationError(
            "XLA's runtime runs in this process already, for a single device, and torch_xla cannot change that. Start "
            "a strategy that lets the compiler shard in a new process, before any other use of an XLA device."
        ) from warning


def _join() -> None:
    """UNPROVEN. Let this process take its chip and know the others; registers the backend ``xla``."""
    importlib.import_module("torch_xla.distributed.xla_backend")
    # its handler reads LOCAL_RANK and LOCAL_WORLD_SIZE, and starts the runtime for them
    next(iter(rendezvous("xla://")))


def _set_products(precision: str) -> str:
    """How float32 is multiplied, in torch_xla's names; returns how it was before."""
    from torch_xla import backends

    before: str = backends.get_mat_mul_precision()
    if before != precision:
        quiet, backends.logger.disabled = backends.logger.disabled, True  # it advises against setting this at all
        backends.set_mat_mul_precision(precision)
        backends.logger.disabled = quiet
    return before


class Graphs:
    """What was compiled in which step, and the shapes that may be its cause.

    Training and evaluation have graphs of their own; torch's gradient mode tells them apart.
    """

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.compiled = self.recompiled = 0
        self.steps: Counter[bool] = Counter()
        self.seen: dict[bool, Counter[Shapes]] = {True: Counter(), False: Counter()}
        self.now: list[Shapes] = []
        self.before: int | None = None

    def note(self, batch: Any) -> None:
        """A batch of the step that is under way."""
        self.now.append(tuple(shapes(batch)))

    def begin(self) -> None:
        """A step begins. What was compiled since the last one is not its doing: rows of a log, a checkpoint, hooks."""
        self.before = _compiled()

    def end(self, seconds: float) -> None:
        """A step was started on the device, which took the host so long."""
        training = torch.is_grad_enabled()
        seen, now, self.now = self.seen[training], self.now, []
        self.steps[training] += 1
        count = _compiled()
        new = 0 if self.before is None else count - self.before
        self.before = count
        if new:
            self.compiled += new
            if self.steps[training] > self.warm_up:
                self.recompiled += new
                self._warn("update" if training else "evaluated batch", self.steps[training], seen, now, seconds)
        seen.update(now)

    def _warn(self, what: str, number: int, seen: Counter[Shapes], now: list[Shapes], seconds: float) -> None:
        fresh = [told(one) for one in now if one not in seen]
        usual = told(seen.most_common(1)[0][0]) if seen else "none"
        if fresh:
            cause = f"a batch came with shapes that were not seen before: {'; '.join(fresh)} (usual: {usual}). "
            cause += "Pad batches to a few sizes, or leave out the last one (drop_last=True)"
        else:
            cause = f"and no shape is new ({'; '.join(map(told, now)) or usual}): something else in the step changed, "
            cause += "such as a Python number that a tensor is built from, or a tensor was read on the host"
        warnings.warn(f"xla: {what} {number} was compiled anew ({seconds:.1f} s): {cause}.", stacklevel=3)


def shapes(batch: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor in a nested batch."""
    from lightning_utilities.core.apply_func import apply_to_collection

    found: list[tuple[str, tuple[int, ...]]] = []
    apply_to_collection(batch, Tensor, lambda t: found.append((str(t.dtype).removeprefix("torch."), tuple(t.shape))))
    return found


def told(found: Shapes) -> str:
    """Shapes as text: ``float32[8, 3], int64[8]``."""
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in found)


def _compiled() -> int:
    from torch_xla.debug import metrics

    return int(metrics.counter_value("UncachedCompile") or 0)
