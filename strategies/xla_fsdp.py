"""Sharding by XLA's compiler: one process, and each parameter cut over all devices that it drives.

Nothing is gathered or scattered by us. Tensors are annotated with how they lie on the devices, the graph of an update
is written down as for one device, and the compiler partitions it and puts the collectives in (GSPMD, Xu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from trivet.plugins import Context, MicroBatch, Needs, OwnState
from trivet.strategies.single import Single

AXIS = "shard"


class XLAFSDP(Single):
    """Parameters, gradients and optimizer state cut along their longest dimension over all devices of one process.

    It is written as `Single`, since to everybody but the compiler there is one process with one device. Batches are cut
    along their first dimension. How many devices there are is XLA's to say (a TPU's chips; ``CPU_NUM_DEVICES``).

    Args:
        min_size: parameters with fewer elements are held whole by every device.
    """

    joint_forward = True  # evaluation, too, runs in parts
    reasons: Mapping[str, str] = {
        "spmd": "It leaves sharding to XLA's compiler: --accelerator xla. Elsewhere --strategy fsdp shards.",
        "several_processes": "One process drives all devices of a machine: --devices 1.",
    }

    def __init__(self, min_size: int = 1024) -> None:
        self.min_size = min_size
        self._steps = False

    @property
    def needs(self) -> Needs:
        return Needs(accelerator=frozenset({"spmd"}))

    def notes(self, world_size: int, deterministic: bool) -> tuple[str, ...]:
        return ("xla-fsdp: one process; the compiler shards over all devices that XLA gives it",)

    # ------------------------------------------------------------------------------------------------------ layout

    def shard(self, root: nn.Module, context: Context) -> nn.Module:
        import torch_xla.runtime
        from torch_xla.distributed import spmd

        root, self._steps = super().shard(root, context), False
        count = torch_xla.runtime.global_runtime_device_count()
        self.mesh = spmd.Mesh(list(range(count)), (count,), (AXIS,))
        for param in root.parameters():
            self.cut(param)
        cut = sum(param.numel() for param in root.parameters() if self.dimension(param) is not None)
        whole = sum(param.numel() for param in root.parameters()) - cut
        self.laid_out = f"{cut:,} parameters over {count} devices, {whole:,} whole on each"
        return root

    def dimension(self, tensor: Tensor) -> int | None:
        """Along which dimension a parameter, and what belongs to it, is cut; None for one that is held whole."""
        if not tensor.dim() or tensor.numel() < self.min_size:
            return None
        return max(range(tensor.dim()), key=tensor.shape.__getitem__)

    def cut(self, tensor: Tensor, dimension: int | None = None) -> None:
        """Tell the compiler how a tensor lies on the devices."""
        from torch_xla.distributed import spmd

        dimension = self.dimension(tensor) if dimension is None else dimension
        spmd.mark_sharding(tensor, self.mesh, tuple(AXIS if d == dimension else None for d in range(tensor.dim())))

    # ------------------------------------------------------------------------------------------------------ update

    def one_batch(self, root: nn.Module, micro: MicroBatch, scale: float | None) -> None:
        self.cut_batch(micro.batch)
        super().one_batch(root, micro, scale)

    def cut_batch(self, batch: Any) -> None:
        """Cut every tensor of a batch along its first dimension."""
        from lightning_utilities.core.apply_func import apply_to_collection

        apply_to_collection(batch, Tensor, lambda tensor: self.cut(tensor, 0) if tensor.dim() else None)

    def evaluate(self, root: nn.Module) -> nn.Module:
        if not self._steps:  # a checkpoint may have been read into the parameters
            self.cut_again(root)
        return Evaluation(root, self.cut_batch)

    def wrap_optimizer(self, root: nn.Module, optimizer: Optimizer) -> None:
        self._steps = True
        optimizer.register_step_post_hook(self.cut_state)

    def cut_state(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Lay out like its parameter what an optimizer keeps for each of its elements."""
        for param, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == param.shape and value.device == param.device:
                    self.cut(value)

    def load_own_state(self, root: nn.Module, state: OwnState) -> None:
        super().load_own_state(root, state)
        self.cut_again(root)

    def load_state_dict(self, module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> None:
        super().load_state_dict(module, state, strict=strict)
        self.cut_again(module)

    def cut_again(self, module: nn.Module) -> None:
        """Lay parameters out anew: one that was copied into lies as what was copied, whole on each device."""
        for param in module.parameters():
            placed = param.detach().cpu().to(param.device)
            self.cut(placed)
            param.data = placed

    def to_optimizer(self, optimizer: Optimizer, param: nn.Parameter, key: str, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and value.shape == param.shape:
            value = value.to(param.device)
            self.cut(value)
        return value


class Evaluation(nn.Module):
    """The StepModule in evaluation, on batches that are cut."""

    def __init__(self, root: nn.Module, cut: Callable[[Any], None]) -> None:
        super().__init__()
        self.root, self.cut = root, cut

    def forward(self, step: str, batch: Any, *args: Any) -> Any:
        self.cut(batch)
        return self.root(step, batch, *args)
