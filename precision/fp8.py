"""Matrix products of linear layers in float8, by torchao; everything else is bf16-mixed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trivet.errors import ConfigurationError, PluginBroken
from trivet.plugins import Needs
from trivet.precision.layers import Choice, told
from trivet.precision.mixed import BF16Mixed

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
HARDWARE = 16  # sizes that float8 products of CUDA devices need to be multiples of
CAPABILITY = (8, 9)  # the first compute capability that multiplies float8


REASONS = {
    "collectives:float8": "With all_gather weights are sent in float8, as NCCL does and gloo does not: leave it out.",
    "fsdp_extensions": "all_gather is for strategies that send of a parameter what its tensor says, fsdp and zero3: "
    "leave it out.",
    "replaced_layers": "Its layers are torchao's, in place of the user's.",
}


class FP8Mixed(BF16Mixed):
    """Products of linear layers in float8, scaled as they are made (Micikevicius et al. 2022); else as bf16-mixed.

    Layers are converted by torchao. Parameters, optimizer state and gradients stay in float32, layers give bfloat16.

    Args:
        recipe: how values are scaled into float8: ``"tensorwise"``, one scale for a tensor, which is fastest;
            ``"rowwise"``, more exact; ``"rowwise_with_gw_hp"``, with gradients of weights in bfloat16, most exact.
        emulate: multiply in float32 what was rounded to float8. None: where the device is not a CUDA device.
        smallest: leave layers alone whose input or output has fewer features.
        multiple_of: leave layers alone whose input or output is not a multiple of this; devices need 16.
        skip: names of layers, or of modules that hold some, to leave alone.
        all_gather: let fsdp send these layers' weights in float8.
    """

    extra: ClassVar[str] = "fp8"
    reasons: Mapping[str, str] = REASONS

    def __init__(
        self,
        *,
        recipe: str = "tensorwise",
        emulate: bool | None = None,
        smallest: int = 256,
        multiple_of: int = HARDWARE,
        skip: Sequence[str] = (),
        all_gather: bool = False,
    ) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise PluginBroken(
                "precision 'fp8-mixed' needs the package torchao, which is not installed. Install it with: "
                "pip install 'trivet[fp8]'"
            )
        if recipe not in RECIPES:
            raise ConfigurationError(f"fp8-mixed: recipe={recipe!r} is unknown; allowed are {', '.join(RECIPES)}.")
        if smallest < 1 or multiple_of < 1:
            raise ConfigurationError(
                f"fp8-mixed: smallest={smallest!r} and multiple_of={multiple_of!r} must be at least 1."
            )
        if emulate is False and multiple_of % HARDWARE:
            raise ConfigurationError(
                f"fp8-mixed: multiple_of={multiple_of!r} with emulate=False; devices multiply float8 of sizes that are "
                f"multiples of {HARDWARE}. Leave it out, or emulate."
            )
        if all_gather and recipe != "tensorwise":
            raise ConfigurationError(
                f"fp8-mixed: all_gather with recipe={recipe!r}; torchao sends weights with one scale for a tensor. Use "
                "recipe='tensorwise'."
            )
        super().__init__()
        self.recipe = recipe
        self.emulate = emulate
        self.smallest = smallest
        self.multiple_of = multiple_of
        self.skip = skip
        self.all_gather = all_gather
        self._emulates = emulate is not False  # until the device is known

    @property
    def needs(self) -> Needs:
        device, strategy = {"float8"}, {"replaced_layers"}
        if self.all_gather:
            device.add("collectives:float8")
            strategy.add("fsdp_extensions")
        wanted = super().needs
        return Needs(accelerator=wanted.accelerator | device, strategy=wanted.strategy | strategy)

    def forward_context(self, device_type: str) -> Any:
        self._emulates = device_type != "cuda" if self.emulate is None else self.emulate
        if device_type == "cuda" and not self._emulates:
            self._check_device()
        return super().forward_context(device_type)

    def _check_device(self) -> None:
        """Only here, in the process that trains: asking a device what it is makes a context on it."""
        if self.multiple_of % HARDWARE:
            raise ConfigurationError(
                f"fp8-mixed: multiple_of={self.multiple_of!r}, and this device multiplies float8 of sizes that are "
                f"multiples of {HARDWARE}. Leave it out, or say emulate=True."
            )
        found = torch.cuda.get_device_capability()
        if found < CAPABILITY:
            raise ConfigurationError(
                f"fp8-mixed: {torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}, and float8 "
                f"products begin with {CAPABILITY[0]}.{CAPABILITY[1]}. Use --precision bf16-mixed, or "
                "--precision.emulate true, which is slow."
            )

    def convert(self, module: nn.Module) -> nn.Module:
        module = super().convert(module)
        choice = Choice(module, self.skip, self._unfit)
        how = f"multiply in float8 ({self.recipe}{', emulated' if self._emulates else ''})"
        self.converted = told(choice, how, "bfloat16")
        if not choice.taken:
            return module
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # slow, and noisy

        config = replace(
            Float8LinearConfig.from_recipe_name(self.recipe),
            emulate=self._emulates,
            enable_fsdp_float8_all_gather=self.all_gather,
        )
        kept = set(module.modules())
        module = convert_to_float8_training(
            module, config=config, module_filter_fn=lambda layer, name: layer in choice.taken
        )
        for layer in set(module.modules()) - kept:
            layer.register_forward_pre_hook(autocast_input)
        return module

    def _unfit(self, layer: nn.Linear, shares: bool) -> str:
        sizes = layer.in_features, layer.out_features
        if min(sizes) < self.smallest:
            return f"smaller than {self.smallest}"
        if any(size % self.multiple_of for size in sizes):
            return f"not a multiple of {self.multiple_of}"
        if self.all_gather and shares:
            return "weight is shared"
        return ""


def autocast_input(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What autocast does to the input of a linear layer; torchao's own does it on CUDA devices alone."""
    given, *rest = args
    if isinstance(given, Tensor) and torch.is_autocast_enabled(given.device.type):
        given = given.to(torch.get_autocast_dtype(given.device.type))
    return (given, *rest)
