"""fp8-mixed: which layers it takes, what they give, what is negotiated, and a language model that learns as well."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from ranks import on_two_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.capabilities import resolve
from trivet.errors import ConfigurationError, PlanError, PluginBroken
from trivet.precision.fp8 import FP8Mixed

ALL = {"smallest": 1, "multiple_of": 1}


class Own(nn.Linear):
    """A layer that does something of its own."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.odd, self.small = nn.Linear(32, 64), nn.Linear(64, 20), nn.Linear(20, 8)
        self.own, self.seen, self.head = Own(32, 32), nn.Linear(32, 32), nn.Linear(64, 32)
        self.seen.register_forward_hook(lambda layer, args, output: None)
        self.attention = nn.MultiheadAttention(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.small(self.odd(self.wide(x)))
        return y


def converted(**options: Any) -> tuple[FP8Mixed, Net]:
    precision = FP8Mixed(**options)
    precision.forward_context("cpu")
    net = Net()
    assert precision.convert(net) is net
    return precision, net


def test_layers_that_do_not_fit_are_left_alone_and_listed() -> None:
    precision, net = converted(smallest=16, skip=["head"])
    assert type(net.wide).__name__ == "Float8Linear"
    assert [type(layer) for layer in (net.odd, net.small, net.own, net.head)] == [nn.Linear, nn.Linear, Own, nn.Linear]
    assert precision.converted == (
        "1 of 7 linear layers multiply in float8 (tensorwise, emulated): wide; left in bfloat16: odd (not a multiple "
        "of 16), small (smaller than 16), own (of the class Own), seen (with hooks), head (skipped by name), "
        "attention.out_proj (of the class NonDynamicallyQuantizableLinear)"
    )
    assert type(converted(smallest=16, skip="wide")[1].wide) is nn.Linear, "one name alone"
    with pytest.raises(ConfigurationError, match=r"skip names 'heat', and the model has no .* Did you mean 'head'\?"):
        converted(skip=["wide", "heat"])
    shared = Net()
    shared.tail = nn.Sequential(shared.wide)
    FP8Mixed(smallest=16, skip=["tail"]).convert(shared)
    assert type(shared.wide) is nn.Linear, "the second name of a shared one"
    precision, net = converted()
    assert precision.converted.startswith("0 of 7 linear layers multiply in float8 (tensorwise, emulated); left in")
    assert type(net.wide) is nn.Linear


def test_many_names_are_shortened() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    precision = FP8Mixed(smallest=16)
    precision.convert(net)
    assert precision.converted.endswith("left in bfloat16: 0, 1, 2, 3, ... 13 more ..., 17, 18, 19 (smaller than 16)")


def test_products_are_rounded_to_float8_and_parameters_stay() -> None:
    precision, net = converted(smallest=16)
    plain = Net()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(48, 32)
    with precision.forward_context("cpu"):
        y, z = net.wide(x), plain.wide(x)
        with torch.autocast("cpu", enabled=False):
            assert net.wide(x).dtype == torch.float32
    assert (y.dtype, z.dtype) == (torch.bfloat16, torch.bfloat16)
    off = ((y - z).float().norm() / z.float().norm()).item()
    assert 0.01 < off < 0.1  # three bits for the digits; bfloat16 alone is off by 0.003
    y.float().sum().backward()
    assert net.wide.weight.grad is not None
    assert {net.wide.weight.dtype, net.wide.weight.grad.dtype} == {torch.float32}
    assert pickle.loads(pickle.dumps(net.wide)).weight.equal(net.wide.weight)


def test_converted_again_with_other_options() -> None:
    _, net = converted(smallest=16)
    weight, layer = net.wide.weight, net.wide
    other = FP8Mixed(smallest=16, recipe="rowwise", emulate=False)
    other.convert(net)
    assert net.wide.weight is weight
    assert net.wide is not layer
    assert "rowwise): wide" in other.converted


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recipe": "columnwise"}, "recipe='columnwise' is unknown; allowed are tensorwise, rowwise"),
        ({"smallest": 0}, "smallest=0 and multiple_of=16 must be at least 1"),
        ({"emulate": False, "multiple_of": 8}, r"multiple_of=8 with emulate=False.*multiples of 16"),
        ({"all_gather": True, "recipe": "rowwise"}, "all_gather with recipe='rowwise'"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        FP8Mixed(**options)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PluginBroken, match=r"needs the package torchao.*pip install 'trivet\[fp8\]'"):
        FP8Mixed()


def test_a_device_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch, "autocast", lambda *args: None)
    with pytest.raises(ConfigurationError, match=r"Some A100 has compute capability 8\.0.*begin with 8\.9.*emulate"):
        FP8Mixed().forward_context("cuda")
    FP8Mixed(emulate=True).forward_context("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ConfigurationError, match="multiple_of=1, and this device"):
        FP8Mixed(multiple_of=1).forward_context("cuda")
    precision, net = FP8Mixed(smallest=16), Net()
    precision.forward_context("cuda")
    precision.convert(net)
    assert "in float8 (tensorwise): wide" in precision.converted


def test_float8_on_the_wire_is_negotiated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # DeepSpeed may not be installed
    gathering = {"name": "fp8-mixed", "all_gather": True}
    with pytest.raises(PlanError) as caught:
        resolve(strategy="fsdp", accelerator="cpu", precision=gathering, devices=2)
    assert "the first wants 'collectives:float8', which the second does not offer. With all_gather" in str(caught.value)
    with pytest.raises(PlanError, match=r"'fsdp_extensions'.*leave it out"):
        resolve(strategy="ddp", accelerator="cpu", precision=gathering, devices=2)
    with pytest.raises(PlanError, match=r"'replaced_layers'.*DeepSpeed's engine casts.*--strategy ddp, zero2 or fsdp"):
        resolve(strategy="deepspeed", accelerator="cpu", precision="fp8-mixed", devices=2)
    resolve(strategy="fsdp", accelerator="cpu", precision="fp8-mixed", devices=2)


class Tiny(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.losses: list[float] = []
        self.notes: tuple[str, ...] = ()

    def on_train_start(self) -> None:
        self.notes = self._attached().plan.notes

    def blocks(self) -> list[nn.Module]:
        return [self.net[0]]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[0]).pow(2).mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(**options: Any) -> tuple[Tiny, trivet.Trainer]:
    torch.manual_seed(0)
    module, data = Tiny(), DataLoader(TensorDataset(torch.randn(64, 16)), 8)
    precision = {"name": "fp8-mixed", "smallest": 16, **options.pop("precision", {})}
    trainer = trivet.Trainer(
        accelerator="cpu", precision=precision, max_epochs=2, logger=False, enable_checkpointing=False, **options
    )
    trainer.fit(module, data)
    return module, trainer


def test_the_run_says_what_was_converted(capsys: pytest.CaptureFixture[str]) -> None:
    module, _ = fit()
    told = "2 of 2 linear layers multiply in float8 (tensorwise, emulated): net.0, net.2"
    assert f"fp8-mixed: {told}\n" in capsys.readouterr().err
    assert module.notes[-1] == told  # in the Plan that checkpoints hold


def gathered(gather: bool) -> list[float]:
    """Task: the losses of a run in which gloo is taken to send float8, which it does where a unit has other dtypes."""
    from trivet.accelerators.cpu import CPU

    offers: Any = CPU.offers
    CPU.offers = property(lambda self: offers.fget(self) | {"collectives:float8"})  # type: ignore[misc,assignment]
    try:
        return fit(strategy="fsdp", devices=2, precision={"all_gather": gather})[0].losses
    finally:
        CPU.offers = offers  # type: ignore[method-assign]


def test_weights_that_are_sent_in_float8_train_the_same() -> None:
    kept, sent = on_two_ranks(gathered, False), on_two_ranks(gathered, True)
    torch.testing.assert_close(sent, kept, rtol=1e-3, atol=1e-4)


def perplexing(precision: Any) -> float:
    """The validation loss of the language model of the examples, reduced: 60 updates instead of 600."""
    import char_lm

    torch.manual_seed(1)
    trainer = trivet.Trainer(
        accelerator="cpu", precision=precision, max_steps=STEPS, val_check_interval=STEPS, limit_val_batches=8,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    model = char_lm.CharLM(width=32, layers=1, context=32, warmup=5)
    trainer.fit(model, datamodule=char_lm.Topics(context=32))
    layers = {type(layer).__name__ for layer in model.layers[0].mlp if isinstance(layer, nn.Linear)}
    assert layers == {"Linear" if precision == "bf16-mixed" else "Float8Linear"}
    return float(trainer.callback_metrics["val/loss"])


STEPS = 60


def test_a_language_model_learns_as_well_as_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
    low = perplexing({"name": "fp8-mixed", "smallest": 16})
    usual = perplexing("bf16-mixed")
    print(f"validation loss after {STEPS} updates: fp8-mixed {low:.4f}, bf16-mixed {usual:.4f}")
    assert usual < 3.0  # it begins at 4.5, and the frequencies of characters alone give 3.2
    assert abs(low / usual - 1) < 0.02
