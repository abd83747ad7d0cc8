"""Precisions of other libraries. Transformer Engine's is run against a stand-in, since it needs a device; that of
bitsandbytes for real where it is installed, which CI does not do."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trivet
from ranks import on_two_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet import registry
from trivet.callbacks import Checkpoint
from trivet.capabilities import resolve
from trivet.errors import ConfigurationError, PlanError, PluginBroken
from trivet.precision.te import TransformerEngine, Within

LIBRARIES = {"transformer-engine": "transformer_engine", "bnb-int8": "bitsandbytes", "bnb-nf4": "bitsandbytes"}
installed = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_missing_library_is_refused_with_the_device_that_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginBroken) as caught:
        registry.make("precision", name)
    text = str(caught.value)
    assert f"precision {name!r} needs the package {LIBRARIES[name]}, which is not installed, and a" in text
    assert "CUDA" in text
    assert "Install it with: pip install" in text


@pytest.mark.parametrize(
    ("name", "capability", "text"),
    [
        ("transformer-engine", "kernels:cuda", "Transformer Engine needs a CUDA device of compute capability 8.9"),
        ("bnb-nf4", "native_kernels", "bitsandbytes needs a device that its kernels are written for"),
    ],
)
def test_a_missing_device_is_refused_with_the_library(
    name: str, capability: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trivet.accelerators.cpu import CPU

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(CPU, "offers", CPU().offers - {capability})
    with pytest.raises(PlanError) as caught:
        resolve(strategy="single", accelerator="cpu", precision=name)
    assert f"the first wants {capability!r}, which the second does not offer. {text}" in str(caught.value)


# --------------------------------------------------------------------------------------------------- Transformer Engine


class Stand(nn.Module):
    """As much of `transformer_engine.pytorch.Linear` as is used."""

    def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(outputs, dtype=params_dtype, device=device))


def test_transformer_engine_is_called_as_its_documentation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @contextmanager
    def entered(**options: Any) -> Any:
        calls.append(options)
        yield

    te, recipes = ModuleType("transformer_engine.pytorch"), ModuleType("transformer_engine.common.recipe")
    available = [(True, "")]
    vars(te).update(Linear=Stand, is_fp8_available=lambda return_reason: available[0])
    vars(te).update(autocast=entered, is_mxfp8_available=lambda return_reason: (False, "compute capability 10.0"))
    vars(recipes).update(Float8CurrentScaling=lambda: "current scaling")
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, te.__name__, te)
    monkeypatch.setitem(sys.modules, recipes.__name__, recipes)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some device")

    precision = TransformerEngine(smallest=32)
    context = precision.forward_context("cpu")
    for _ in range(2):
        with context, context:
            assert torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("cpu")
    assert calls == [{"enabled": True, "recipe": "current scaling"}] * 4
    net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 20), nn.Linear(16, 16), nn.Linear(32, 32, bias=False))
    weight, bias = net[0].weight, net[0].bias
    precision.convert(net)
    assert [type(layer) for layer in net] == [Stand, nn.Linear, nn.Linear, Stand]
    assert (net[0].weight, net[0].bias) == (weight, bias)
    assert precision.converted.startswith("2 of 4 linear layers are Transformer Engine's (current scaling): 0, 3; left")
    assert precision.converted.endswith("left in bfloat16: 1, 2 (smaller than 32)")
    available[0] = (False, "Device compute capability 8.9 or higher required")
    with pytest.raises(ConfigurationError, match=r"recipe='current' needs a CUDA device.*Some device: Device comp"):
        precision.forward_context("cuda")
    with pytest.raises(ConfigurationError, match=r"recipe='mxfp8' needs a CUDA device.*Some device: compute capab"):
        TransformerEngine(recipe="mxfp8").forward_context("cuda")
    with pytest.raises(ConfigurationError, match="recipe='delayed' is unknown; allowed are current, block, mxfp8"):
        TransformerEngine(recipe="delayed")


def test_a_context_that_cannot_be_entered_leaves_the_others() -> None:
    left: list[str] = []

    @contextmanager
    def first() -> Any:
        yield
        left.append("first")

    @contextmanager
    def second() -> Any:
        raise KeyError
        yield

    with pytest.raises(KeyError), Within(lambda: (first(), second())):
        pass
    with Within(lambda: (first(),)):
        pass
    assert left == ["first"]


# --------------------------------------------------------------------------------------------------------- bitsandbytes


class Adapted(trivet.Module):
    """A frozen layer with a trained one beside it, and one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.head = nn.Linear(64, 64)
        self.base.requires_grad_(False)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.base(x) + self.up(self.down(x))))
        return y

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self(batch[0]).float() - batch[0].roll(1, -1)).pow(2).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(precision: str, epochs: int, strategy: str = "single", devices: int = 1, **options: Any) -> Adapted:
    torch.manual_seed(0)
    module, data = Adapted(), DataLoader(TensorDataset(torch.randn(64, 64)), 8)
    path = options.pop("ckpt_path", None)
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, precision=precision, max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_checkpointing="callbacks" in options, **options,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=path)
    return module


@installed
@pytest.mark.filterwarnings("ignore")  # what the library warns of is not ours
@pytest.mark.parametrize("bits", ["int8", "nf4"])
def test_frozen_layers_are_stored_in_few_bits_and_train_beside(bits: str, tmp_path: Path) -> None:
    usual, saver = fit("bf16-mixed", 3).losses, Checkpoint(tmp_path)
    module = fit(f"bnb-{bits}", 3)
    assert type(module.head) is nn.Linear
    assert module.base.weight.nbytes == 64 * 64 // (1 if bits == "int8" else 2)
    assert not any(param.requires_grad for param in module.base.parameters())
    assert module.losses[-1] < 0.9 * module.losses[0]
    torch.testing.assert_close(module.losses, usual, rtol=0.05, atol=0.0)
    fit(f"bnb-{bits}", 1, callbacks=[saver])
    rest = fit(f"bnb-{bits}", 3, ckpt_path=saver.last_model_path)
    assert rest.losses == module.losses[8:]
    names = {name for name in module.state_dict() if name.startswith("base.")}
    assert names == {"base.weight", "base.scales", "base.bias"} | ({"base.code"} if bits == "nf4" else set())


def weights(strategy: str) -> dict[str, Tensor]:
    """Task: what a run over two processes ends with."""
    module = fit("bnb-nf4", 1, strategy, 2)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@installed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_several_processes_hold_the_same(strategy: str) -> None:
    first, second = on_two_ranks(weights, strategy)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@installed
@pytest.mark.filterwarnings("ignore")
def test_a_module_without_frozen_layers_is_told() -> None:
    plugin = registry.make("precision", "bnb-nf4").plugin
    with pytest.raises(ConfigurationError, match=r"stores frozen linear layers in nf4, and none fits \(0: trained\)"):
        plugin.convert(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(PlanError, match="'whole_parameters'"):
        resolve(strategy="fsdp", accelerator="cpu", precision="bnb-nf4", devices=2)
