"""What the accelerator `xla` says of itself, with and without torch_xla: nothing here imports it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from trivet import registry
from trivet.accelerators import xla
from trivet.capabilities import resolve
from trivet.errors import PlanError
from trivet.strategies.xla_fsdp import XLAFSDP

INSTALLED = importlib.util.find_spec("torch_xla") is not None


def refusal(**asked: object) -> str:
    with pytest.raises(PlanError) as caught:
        resolve(**{"accelerator": "xla", "devices": 1, **asked})
    return str(caught.value)


def test_it_is_listed_and_made_without_an_import_of_its_library() -> None:
    told = (
        "import sys; from trivet import registry; made = registry.make('accelerator', 'tpu'); "
        "print(made.name, made.plugin.is_available(), 'torch_xla' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[::2] == ["xla", "False"]
    assert registry.canonical("accelerator", "tpu") == "xla"


@pytest.mark.skipif(INSTALLED, reason="torch_xla is installed here")
def test_without_the_library_the_refusal_names_the_extra() -> None:
    text = refusal()
    assert "the package torch_xla is not installed: pip install 'trivet[xla]'" in text
    assert "--accelerator cpu" in text


@pytest.mark.skipif(not INSTALLED, reason="torch_xla is not installed here")
@pytest.mark.parametrize(
    ("platform", "reason"),
    [
        (None, "no TPU was found; PJRT_DEVICE=CPU in the environment chooses XLA's own CPU device"),
        ("CUDA", "PJRT_DEVICE='CUDA'; Trivet knows CPU and TPU"),
        ("TPU", "PJRT_DEVICE=TPU, and no TPU was found on the PCI bus"),
    ],
)
def test_which_device_there_is(platform: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    if platform is not None:
        monkeypatch.setenv("PJRT_DEVICE", platform)
    assert reason in refusal()
    assert resolve(devices=1).plan.accelerator == "cpu", "auto passes it over"


def test_what_it_offers_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert "dtype:float64" in xla.XLA().offers
    assert "collectives" not in xla.XLA().offers
    assert xla.XLA().device_count() == 1
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert "dtype:float64" not in xla.XLA().offers
    assert "collectives" in xla.XLA().offers


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"strategy": "ddp"}, "torch_xla 2.9 crashes with a second process on XLA's CPU device"),
        ({"strategy": "ddp", "devices": 2}, "One process can drive several devices"),
        ({"strategy": "fsdp"}, "On XLA nothing is computed before the update ends"),
        ({"precision": "fp16-mixed"}, "torch's autocast for XLA has bfloat16 alone"),
        ({"precision": "fp16-true"}, "The 16-bit dtype of TPUs is bfloat16"),
        ({"strategy": "xla-fsdp", "devices": 2}, "One process drives all devices of a machine"),
        ({"strategy": "xla-fsdp", "accelerator": "cpu"}, "It leaves sharding to XLA's compiler: --accelerator xla"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(
    asked: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla.XLA, "unavailable_reason", lambda self: "")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert reason in refusal(**asked)


def test_dimensions_are_the_longest_and_small_parameters_stay_whole() -> None:
    import torch

    strategy = XLAFSDP(min_size=8)
    assert strategy.dimension(torch.empty(3, 4)) == 1
    assert strategy.dimension(torch.empty(5, 4)) == 0
    assert strategy.dimension(torch.empty(7)) is None
    assert strategy.dimension(torch.tensor(1.0)) is None


def test_shapes_of_a_batch_as_text() -> None:
    import torch

    batch = {"x": torch.empty(3, 8), "more": [torch.empty(3, dtype=torch.int64), "text"]}
    assert xla.told(tuple(xla.shapes(batch))) == "float32[3, 8], int64[3]"


def test_chips_are_counted_and_other_cards_of_that_vendor_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (vendor, device) in enumerate([("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x8086", "0x0063")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "device").write_text(f"{device}\n")
    monkeypatch.setattr(xla, "PCI", tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert (xla.chips(), xla.platform(), xla.XLA().device_count()) == (1, "TPU", 1)
