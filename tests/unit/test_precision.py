"""The six precisions: what they ask for, what they do to a module, a batch and a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from trivet import registry
from trivet.capabilities import resolve
from trivet.errors import ConfigurationError
from trivet.plugins import Precision, Scaling

NAMES = ["fp32", "fp64", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true"]
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make(name: str) -> Precision:
    plugin: Precision = registry.make("precision", name).plugin
    return plugin


def context(precision: Precision) -> AbstractContextManager[Any]:
    return precision.forward_context("cpu") or nullcontext()


@pytest.mark.parametrize(
    ("name", "param", "compute", "reduce"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32),
        ("fp64", torch.float64, torch.float64, torch.float64),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32),
        ("fp16-mixed", torch.float32, torch.float16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("fp16-true", torch.float16, torch.float16, torch.float16),
    ],
)
def test_policy_is_what_happens(name: str, param: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> None:
    precision = make(name)
    policy = precision.policy
    assert (policy.param, policy.compute, policy.reduce) == (param, compute, reduce)
    layer = nn.Linear(3, 2)
    assert precision.convert(layer) is layer
    with context(precision):
        output = layer(precision.cast_batch(torch.ones(4, 3)))
    output.float().sum().backward()
    assert layer.weight.dtype == param
    assert output.dtype == compute
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == param


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_for(name: str) -> None:
    precision = make(name)
    policy = precision.policy
    dtypes = {f"dtype:{str(dtype).removeprefix('torch.')}" for dtype in (policy.param, policy.compute, policy.reduce)}
    autocast = {f"autocast:{str(policy.compute).removeprefix('torch.')}"} if name.endswith("mixed") else set()
    assert precision.needs.accelerator == dtypes | autocast
    assert precision.needs.strategy == ({"loss_scaling"} if name == "fp16-mixed" else set())
    assert (precision.scaling is not None) == (name == "fp16-mixed")


@pytest.mark.parametrize("accelerator", ["cpu", "object"])
def test_bf16_by_name_and_beside_an_accelerator_object(accelerator: str) -> None:
    from trivet.accelerators.cpu import CPU

    resolved = resolve(accelerator=CPU() if accelerator == "object" else "cpu", precision="bf16")
    precision, layer = resolved.precision.plugin, nn.Linear(3, 2)
    precision.convert(layer)
    with precision.forward_context(resolved.plan.device_type):
        assert layer(torch.ones(1, 3)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    assert resolved.plan.compute_dtype == "bfloat16"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.norm, self.rnn = nn.BatchNorm1d(3), nn.GRU(3, 3)
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_convert_casts_floating_tensors_and_keeps_identity(device: str) -> None:
    with torch.device(device):
        net = Net()
    before = dict(net.named_parameters())
    make("bf16-true").convert(net)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert all(net.get_parameter(name) is parameter for name, parameter in before.items())
    assert net.two.weight is net.one.weight
    assert {name: buffer.dtype for name, buffer in net.named_buffers()} == {
        "norm.running_mean": torch.bfloat16,
        "norm.running_var": torch.bfloat16,
        "norm.num_batches_tracked": torch.int64,
        "phase": torch.complex64,
        "scratch": torch.bfloat16,
    }
    assert "scratch" not in net.state_dict()
    assert all(tensor.device.type == device for tensor in (*net.parameters(), *net.buffers()))
    net.rnn(torch.zeros(2, 1, 3, dtype=torch.bfloat16, device=device))


def test_convert_keeps_what_is_right_already_and_casts_gradients_with_their_parameter() -> None:
    layer = nn.Linear(2, 2)
    pointer = layer.weight.data_ptr()
    make("bf16-mixed").convert(layer)
    assert layer.weight.data_ptr() == pointer
    layer(torch.ones(1, 2)).sum().backward()
    make("fp64").convert(layer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float64


class Pair(NamedTuple):
    inputs: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp64", torch.float64), ("bf16-true", torch.bfloat16), ("fp16-true", torch.float16)]
)
def test_cast_batch_reaches_floating_tensors_only(name: str, dtype: torch.dtype) -> None:
    batch: dict[str, Any] = {
        "pair": Pair(torch.ones(2), torch.ones(2, dtype=torch.int64)),
        "list": [torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool), "text", 3],
        "complex": torch.ones(1, dtype=torch.complex64),
    }
    cast = make(name).cast_batch(batch)
    assert isinstance(cast["pair"], Pair)
    assert (cast["pair"].inputs.dtype, cast["pair"].labels.dtype) == (dtype, torch.int64)
    assert (cast["list"][0].dtype, cast["list"][1].dtype) == (dtype, torch.bool)
    assert cast["list"][2:] == ["text", 3]
    assert cast["complex"].dtype == torch.complex64
    assert batch["pair"].inputs.dtype == torch.float32


@pytest.mark.parametrize("name", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_batches_are_left_alone_by_not_overriding(name: str) -> None:
    assert type(make(name)).cast_batch is Precision.cast_batch


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp64", torch.float64), ("bf16-true", torch.bfloat16), ("fp16-true", torch.float16)]
)
def test_tensors_made_in_the_step_match(name: str, dtype: torch.dtype) -> None:
    entered = make(name).forward_context("cpu")
    assert entered is not None
    for _ in range(2):
        with entered, entered:
            assert torch.zeros(1).dtype == dtype
        assert torch.zeros(1).dtype == torch.float32
    with pytest.raises(KeyError), entered:
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["bf16-mixed", "fp16-mixed"])
def test_autocast_is_entered_again_and_again(name: str) -> None:
    entered, layer = make(name).forward_context("cpu"), nn.Linear(2, 2)
    assert entered is not None
    for _ in range(3):
        with entered:
            assert layer(torch.ones(1, 2)).dtype == LOW[name[:4]]
        assert layer(torch.ones(1, 2)).dtype == torch.float32


def test_scaling_options() -> None:
    selected = registry.make("precision", {"name": "fp16", "initial": 8.0, "interval": 2})
    assert selected.plugin.scaling == Scaling(8.0, 2.0, 0.5, 2)
    given = {"initial": 8.0, "growth": 2.0, "backoff": 0.5, "interval": 2}
    assert selected.options == given | {"scale": True, "reduce": "float32", "matmul": None}


@pytest.mark.parametrize("wrong", [{"initial": 0}, {"growth": 1.0}, {"backoff": 1.0}, {"backoff": 0}, {"interval": 0}])
def test_scaling_options_that_cannot_work(wrong: dict[str, float]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Expected initial > 0, growth > 1, 0 < backoff < 1 and interval >= 1"
    ):
        registry.make("precision", {"name": "fp16", **wrong})
