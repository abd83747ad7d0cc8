"""Frozen linear layers in eight or four bits, by bitsandbytes; what is trained is bf16-mixed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trivet.errors import ConfigurationError, PluginBroken
from trivet.plugins import Needs
from trivet.precision.layers import Choice, told
from trivet.precision.mixed import BF16Mixed

DEVICES = "a device that its kernels are written for: the CPU, CUDA or XPU"


class Frozen(BF16Mixed):
    """Frozen weights of linear layers as bitsandbytes stores them, for adapters that are trained beside them.

    What is frozen (``requires_grad_(False)``) when the run begins is quantised. The quantised values and their scales
    are frozen parameters under the layer's name: in checkpoints, and the same on every rank.

    Args:
        smallest: leave layers alone whose input or output has fewer features.
        skip: names of layers, or of modules that hold some, to leave alone.
    """

    extra: ClassVar[str] = "bitsandbytes"
    bits: ClassVar[str]
    layer: ClassVar[type[Quantised]]
    reasons: Mapping[str, str] = {"native_kernels": f"bitsandbytes needs {DEVICES}."}

    def __init__(self, *, smallest: int = 64, skip: Sequence[str] = ()) -> None:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise PluginBroken(
                f"precision 'bnb-{self.bits}' needs the package bitsandbytes, which is not installed, and {DEVICES}. "
                "Install it with: pip install 'trivet[bitsandbytes]'"
            )
        super().__init__()
        self.smallest = smallest
        self.skip = skip

    @property
    def needs(self) -> Needs:
        wanted = super().needs
        return Needs(
            accelerator=wanted.accelerator | {"native_kernels"},
            strategy=wanted.strategy | {"replaced_layers", "whole_parameters"},
        )

    def convert(self, module: nn.Module) -> nn.Module:
        module = super().convert(module)
        choice = Choice(module, self.skip, self._unfit, again=())
        done = any(getattr(part, "few_bits", False) for part in module.modules())
        if not choice.taken and not done and any(isinstance(part, nn.Linear) for part in module.modules()):
            listed = "; ".join(f"{', '.join(names[:4])}: {reason}" for reason, names in choice.alone.items())
            raise ConfigurationError(
                f"precision 'bnb-{self.bits}' stores frozen linear layers in {self.bits}, and none fits ({listed}). "
                "Freeze them with requires_grad_(False) before the run begins, or use --precision bf16-mixed."
            )
        self.converted = told(choice, f"are stored in {self.bits}", "float32")
        made: dict[nn.Module, nn.Module] = {}
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if layer in choice.taken:
                    made.setdefault(layer, self.layer(layer))  # type: ignore[arg-type]
                    setattr(owner, name, made[layer])
        return module

    def _unfit(self, layer: nn.Linear, shares: bool) -> str:
        if layer.weight.requires_grad:
            return "trained"
        if layer.weight.is_meta:
            return "without values yet"
        if min(layer.in_features, layer.out_features) < self.smallest:
            return f"smaller than {self.smallest}"
        return "weight is shared" if shares else ""


class Quantised(nn.Module):
    """A linear layer whose weight is stored in few bits. All it holds is frozen parameters, but for a trained bias."""

    few_bits: ClassVar[bool] = True  # by which what was converted is known
    weight: Tensor
    scales: Tensor
    code: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        for name, tensor in self.stored(layer.weight.detach()).items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))
        self.bias = layer.bias

    def stored(self, weight: Tensor) -> dict[str, Tensor]:
        """What is kept of a weight, by name."""
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output for an input in the compute dtype."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        with torch.autocast(kind, enabled=False):  # the kernels know their dtypes
            if torch.is_autocast_enabled(kind):
                x = x.to(torch.get_autocast_dtype(kind))
            return self.product(x, None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8(Quantised):
    """Each row of the weight as int8 with a scale; inputs are rounded to int8, too (Dettmers et al. 2022, LLM.int8)."""

    def stored(self, weight: Tensor) -> dict[str, Tensor]:
        values, scales, _ = library().functional.int8_vectorwise_quant(weight.half())
        return {"weight": values, "scales": scales}

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        bnb = library()
        state = bnb.MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights = self.weight, self.scales, False
        found: Tensor = bnb.matmul(x.half(), self.weight, state=state, bias=None if bias is None else bias.half())
        return found.to(x.dtype)


class NF4(Quantised):
    """Blocks of 64 weights, each of sixteen values that are the quantiles of a normal distribution (QLoRA, 2023)."""

    def stored(self, weight: Tensor) -> dict[str, Tensor]:
        values, state = library().functional.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK)
        return {"weight": values, "scales": state.absmax, "code": state.code}

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        bnb = library()
        state = bnb.functional.QuantState(
            self.scales, torch.Size((self.out_features, self.in_features)), self.code, BLOCK, "nf4", x.dtype
        )
        found: Tensor = bnb.matmul_4bit(x, self.weight.t(), quant_state=state, bias=bias)
        return found


BLOCK = 64


class FrozenInt8(Frozen):
    """`Frozen` in int8: a quarter of float32's memory."""

    bits, layer = "int8", Int8


class FrozenNF4(Frozen):
    """`Frozen` in four bits: an eighth of float32's memory."""

    bits, layer = "nf4", NF4


def library() -> Any:
    """bitsandbytes; slow to import, and nothing to do in the launching process."""
    return importlib.import_module("bitsandbytes")
