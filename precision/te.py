"""Linear layers in float8 by NVIDIA's Transformer Engine; everything else is bf16-mixed. Never run on a device yet."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from trivet.errors import ConfigurationError, PluginBroken
from trivet.plugins import Needs
from trivet.precision.layers import Choice, told
from trivet.precision.mixed import BF16Mixed

# Those without state of their own: delayed scaling keeps a history, and reduces it over the ranks by itself.
RECIPES = {"current": "Float8CurrentScaling", "block": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
AVAILABLE = {"current": "is_fp8_available", "block": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}
ALIGNED = {"current": 16, "block": 16, "mxfp8": 32}  # sizes that its products need to be multiples of
DEVICE = "a CUDA device of compute capability 8.9 or higher"


class TransformerEngine(BF16Mixed):
    """`transformer_engine.pytorch.Linear` in place of linear layers that fit, within its autocast; else bf16-mixed.

    Args:
        recipe: how values are scaled: ``"current"``, one scale for a tensor; ``"block"``, for each block of 128,
            compute capability 9.0 and up; ``"mxfp8"``, for each 32 values, 10.0 and up.
        smallest: leave layers alone whose input or output has fewer features.
        skip: names of layers, or of modules that hold some, to leave alone.
    """

    extra: ClassVar[str] = "transformer-engine"
    reasons: Mapping[str, str] = {"kernels:cuda": f"Transformer Engine needs {DEVICE}."}

    def __init__(self, *, recipe: str = "current", smallest: int = 256, skip: Sequence[str] = ()) -> None:
        if importlib.util.find_spec("transformer_engine") is None:
            raise PluginBroken(
                "precision 'transformer-engine' needs the package transformer_engine, which is not installed, and "
                f"{DEVICE}. Install it with: pip install --no-build-isolation 'trivet[transformer-engine]'"
            )
        if recipe not in RECIPES:
            raise ConfigurationError(
                f"transformer-engine: recipe={recipe!r} is unknown; allowed are {', '.join(RECIPES)}."
            )
        super().__init__()
        self.recipe = recipe
        self.smallest = smallest
        self.skip = skip

    @property
    def needs(self) -> Needs:
        wanted = super().needs
        return Needs(accelerator=wanted.accelerator | {"kernels:cuda"}, strategy=wanted.strategy | {"replaced_layers"})

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        te = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
        good, reason = getattr(te, AVAILABLE[self.recipe])(return_reason=True)
        if not good:
            raise ConfigurationError(
                f"precision 'transformer-engine' with recipe={self.recipe!r} needs {DEVICE}; "
                f"{torch.cuda.get_device_name()}: {reason}"
            )
        recipe = getattr(recipes, RECIPES[self.recipe])()
        outer = partial(super().forward_context, device_type)
        return Within(lambda: (outer(), te.autocast(enabled=True, recipe=recipe)))

    def convert(self, module: nn.Module) -> nn.Module:
        module = super().convert(module)
        choice = Choice(module, self.skip, self._unfit, again=())
        self.converted = told(choice, f"are Transformer Engine's ({self.recipe} scaling)", "bfloat16")
        if not choice.taken:
            return module
        te = importlib.import_module("transformer_engine.pytorch")
        made: dict[nn.Module, nn.Module] = {}
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if layer in choice.taken:
                    if layer not in made:
                        made[layer] = replaced(te, layer)  # type: ignore[arg-type]
                    setattr(owner, name, made[layer])
        return module

    def _unfit(self, layer: nn.Linear, shares: bool) -> str:
        sizes, aligned = (layer.in_features, layer.out_features), ALIGNED[self.recipe]
        if min(sizes) < self.smallest:
            return f"smaller than {self.smallest}"
        return f"not a multiple of {aligned}" if any(size % aligned for size in sizes) else ""


def replaced(te: Any, layer: nn.Linear) -> nn.Module:
    """Transformer Engine's layer with the parameters of a plain one, under the same names."""
    made: nn.Module = te.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device="meta",
    )
    made.weight = layer.weight
    if layer.bias is not None:
        made.bias = layer.bias
    return made


class Within(AbstractContextManager[None]):
    """Contexts inside each other that are made anew each time: those of generators can be entered once only."""

    def __init__(self, make: Callable[[], tuple[AbstractContextManager[Any], ...]]) -> None:
        self.make = make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.make():
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)
