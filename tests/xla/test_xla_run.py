"""A run on XLA's CPU device: what is read on the host, what is compiled, and what autocast keeps in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import trivet
from torch import Tensor, nn
from trivet.accelerators.xla import XLA
from trivet.errors import ConfigurationError
from xla_runs import Plain, loader, trainer

pytest.importorskip("torch_xla")
F = nn.functional


class Watch(trivet.Callback):
    """Counts what came from the device before each update's hooks, and what was compiled and executed."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.compiled: list[int] = []

    def on_update_end(self, trainer: Any, module: Any) -> None:
        self.reads.append(reads())
        self.compiled.append(counter("UncachedCompile"))


def counter(name: str) -> int:
    from torch_xla.debug import metrics

    return metrics.counter_value(name) or 0


def reads() -> int:
    """Transfers from the device, tensors read as numbers, and operations that XLA left to the CPU."""
    from torch_xla.debug import metrics

    transfers = metrics.metric_data("TransferFromDeviceTime")
    left = sum(counter(name) for name in metrics.counter_names() if name.startswith("aten::"))
    return left + (transfers[0] if transfers else 0)


def steps(values: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(values)]


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_metrics_are_fetched_once_per_log_interval_and_nothing_else_is_read(precision: str) -> None:
    """Clipping reports a norm, AdamW counts steps, dropout draws; 24 updates with a row of the log after every 6."""
    watch = Watch()
    run = trainer(callbacks=[watch], precision=precision, gradient_clip_val=0.1, log_every_n_steps=6)
    run.fit(Plain(), loader(96))
    transfers = steps(watch.reads)
    rows = [update for update in range(2, 25) if transfers[update - 2]]
    assert rows == [6, 12, 18, 24]
    assert {transfers[update - 2] for update in rows} == {1}, "one transfer"
    assert set(steps(watch.compiled)[8:]) == {0}, "and nothing is compiled any more"
    assert torch.isfinite(torch.tensor(run.callback_metrics["grad_norm"]))


def test_a_step_is_compiled_twice_and_then_never() -> None:
    """Without optimizer state, and with it. Evaluation is cut after each batch, so that its graph stays small."""
    device = XLA()
    run = trainer(accelerator=device, max_epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.fit(Plain(), loader(64), loader(24))
    stats = device.stats()
    assert stats["compiled"] <= 3, "two of training, one of validation; fewer where this process has had the same"
    assert stats["recompiled"] == 0


def test_a_new_shape_in_the_steady_state_is_counted_and_named() -> None:
    device = XLA(warm_up=3)
    run = trainer(accelerator=device)
    with pytest.warns(
        UserWarning, match=r"update 7 was compiled anew .*float32\[1, 3\], float32\[1, 2\] .*usual: float32\[4, 3\]"
    ):
        run.fit(Plain(), loader(25))
    assert device.stats()["recompiled"] == 1


def test_a_graph_that_changes_without_a_new_shape_is_told_too() -> None:
    device = XLA(warm_up=3)
    run = trainer(accelerator=device)
    with pytest.warns(UserWarning, match=r"update 6 was compiled anew .* no shape is new .* such as a Python number"):
        run.fit(Plain(width=5), loader(24))


def test_inductor_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="compile=True is for torch's Inductor"):
        trainer(compile=True).fit(Plain(), loader(8))


def test_the_module_and_the_process_are_left_whole_and_it_trains_again() -> None:
    from torch_xla import backends

    module, before = Plain(), (backends.get_mat_mul_precision(), backends.logger.disabled)
    run = trainer(precision={"name": "fp32", "matmul": "high"})
    run.fit(module, loader(16))
    assert (backends.get_mat_mul_precision(), backends.logger.disabled) == before
    assert {param.device.type for param in module.parameters()} == {"xla"}
    assert module.net(torch.zeros(1, 3, device="xla")).cpu().shape == (1, 2)
    trainer(accelerator="cpu").fit(module, loader(16))
    assert {param.device.type for param in module.parameters()} == {"cpu"}


def test_synchronizing_waits_for_steps_that_were_started_before(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    waited: list[int] = []
    wait = xm.wait_device_ops
    monkeypatch.setattr(xm, "wait_device_ops", lambda: (waited.append(1), wait()))
    device = XLA()
    device.setup(device.device(0))
    tensor = torch.ones(4, device="xla") * 2
    torch_xla.sync()  # nothing is pending any more: torch_xla's own sync(wait=True) would return at once
    device.synchronize()
    assert len(waited) == 1
    assert tensor.tolist() == [2.0] * 4


def test_predictions_come_back_on_the_cpu() -> None:
    class Predicting(Plain):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

    found = trainer().predict(Predicting(), loader(8))
    assert [one.device.type for one in found] == ["cpu", "cpu"]


IN_FLOAT32: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h.softmax(-1),
    "log_softmax": lambda h: h.log_softmax(-1),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.zeros(4, dtype=torch.int64, device=h.device)),
    "mse_loss": lambda h: F.mse_loss(h, h * 2),
    "l1_loss": lambda h: F.l1_loss(h, h * 2),
    "smooth_l1_loss": lambda h: F.smooth_l1_loss(h, h * 2),
    "huber_loss": lambda h: F.huber_loss(h, h * 2),
    "kl_div": lambda h: F.kl_div(h, h.softmax(-1), reduction="batchmean"),
    "with_logits": lambda h: F.binary_cross_entropy_with_logits(h, torch.ones_like(h)),
    "poisson": lambda h: F.poisson_nll_loss(h, torch.ones_like(h)),
    "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "group_norm": lambda h: F.group_norm(h, 2),
    "rms_norm": lambda h: F.rms_norm(h, h.shape[-1:]),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True),
    "norm": lambda h: h.norm(),
    "vector_norm": lambda h: torch.linalg.vector_norm(h, dim=-1),
    "normalize": lambda h: F.normalize(h),
    "cosine_similarity": lambda h: F.cosine_similarity(h, h * 2, -1),
    "sum": lambda h: h.sum(),
    "sum over a dimension": lambda h: h.sum(-1),
    "cumsum": lambda h: h.cumsum(0),
    "logsumexp": lambda h: h.logsumexp(-1),
    "exp": lambda h: h.exp(),
    "log": lambda h: h.abs().log(),
    "softplus": lambda h: F.softplus(h),
}


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_autocast_keeps_in_float32_what_torchs_table_does(name: str) -> None:
    """Softmax, losses and norms of what a layer gave in bfloat16; their gradients come back through it."""
    device = XLA()
    device.setup(device.device(0))
    layer = nn.Linear(3, 8).to("xla")
    with torch.autocast("xla", torch.bfloat16):
        hidden = layer(torch.randn(4, 3, device="xla"))
        found = IN_FLOAT32[name](hidden)
    assert (hidden.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    if name == "kl_div":
        return  # torch_xla 2.9 warns of its backward, with autocast and without
    found.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_outside_of_autocast_the_table_changes_nothing() -> None:
    half = torch.ones(4, 8, dtype=torch.bfloat16, device="xla")
    assert {F.rms_norm(half, (8,)).dtype, half.sum().dtype, half.norm().dtype} == {torch.bfloat16}
