"""ModelSummary, ThroughputMonitor, DeviceStatsMonitor and GradientAccumulationScheduler."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from callback_runs import Net, loader, trainer
from ranks import on_two_ranks
from trivet.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    ModelSummary,
    RichModelSummary,
    ThroughputMonitor,
)
from trivet.callbacks.summary import human, summarize
from trivet.errors import ConfigurationError


def table(made: trivet.Trainer) -> list[dict[str, str]]:
    with open(Path(made.log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------------------ summary


def test_a_table_of_layers() -> None:
    net = Net()
    net.net[0].requires_grad_(False)
    net.net[1].eval()
    found = summarize(net, 2)
    assert [(layer.name, layer.type, layer.parameters, layer.trainable) for layer in found.layers] == [
        ("net", "Sequential", 49, 9),
        ("net.0", "Linear", 40, 0),
        ("net.1", "Tanh", 0, 0),
        ("net.2", "Linear", 9, 9),
    ]
    assert (found.total_parameters, found.trainable_parameters, found.bytes) == (49, 9, 196)
    text = str(found).splitlines()
    assert text[0].split() == ["|", "Name", "|", "Type", "|", "Params", "|", "Trainable", "|", "Mode"]
    assert text[2].split(" | ")[1:3] == ["net  ", "Sequential"]
    assert "eval" in text[4]
    assert text[-3:] == [
        f"{9:>9} trainable parameters",
        f"{40:>9} frozen parameters",
        f"{49:>9} parameters in all, 0.000 MB",
    ]


def test_depths() -> None:
    assert [layer.name for layer in summarize(Net(), 1).layers] == ["net"]
    assert summarize(Net(), 0).layers == []
    assert len(summarize(Net(), -1).layers) == 4
    with pytest.raises(ConfigurationError, match="max_depth=-2"):
        ModelSummary(max_depth=-2)


def test_tied_parameters_count_once_and_meta_will_do() -> None:
    with torch.device("meta"):
        first, second = torch.nn.Linear(1000, 1000, bias=False), torch.nn.Linear(1000, 1000, bias=False)
    second.weight = first.weight
    found = summarize(torch.nn.Sequential(first, second))
    assert [layer.parameters for layer in found.layers] == [1_000_000, 1_000_000]
    assert (found.total_parameters, found.model_size) == (1_000_000, 4.0)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1200, "1.2 K"), (7_654_321, "7.7 M"), (3 * 10**9, "3.0 B")]
)
def test_numbers_for_people(number: int, text: str) -> None:
    assert human(number) == text


@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_it_prints_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str], summary: Any) -> None:
    trainer(tmp_path, summary(), max_epochs=1).fit(Net(), loader(8))
    out = capsys.readouterr().out
    assert "Sequential" in out
    assert "49 parameters in all" in out


def summed_up(root: Any, strategy: str) -> Any:
    summary = ModelSummary(2)
    trainer(root, summary, max_epochs=1, strategy=strategy, enable_checkpointing=False).fit(Net(), loader(8))
    assert summary.summary is not None
    return [layer.parameters for layer in summary.summary.layers], summary.summary.bytes


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_whole_sizes_where_parameters_are_sharded(tmp_path: Path, strategy: str) -> None:
    assert on_two_ranks(summed_up, tmp_path, strategy) == [([49, 40, 0, 9], 196)] * 2


# --------------------------------------------------------------------------------------------------------- throughput


class Counted(Net):
    flops_per_batch = 1000.0


def test_rates_in_the_rows(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(length_fn=lambda batch: batch[0].numel(), window_size=4, available_flops=1e12)
    made = trainer(tmp_path, monitor, max_epochs=2, logger=True, accumulate_grad_batches=2, log_every_n_steps=2)
    made.fit(Counted(), loader(), loader(8))
    rows = [row for row in table(made) if row["train/time"]]
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8]
    assert [float(row["train/samples"]) for row in rows] == [16, 32, 48, 64]
    assert [float(row["train/batches"]) for row in rows] == [4, 8, 12, 16]
    assert [float(row["train/lengths"]) for row in rows] == [64, 128, 192, 256]
    for row in rows:
        batches = float(row["train/device/batches_per_sec"])
        assert float(row["train/device/samples_per_sec"]) == pytest.approx(4 * batches)
        assert float(row["train/device/items_per_sec"]) == pytest.approx(16 * batches)
        assert float(row["train/device/flops_per_sec"]) == pytest.approx(1000 * batches)
        assert float(row["train/device/mfu"]) == pytest.approx(1000 * batches / 1e12)


def throughput(root: Any) -> Any:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    made = trainer(root, monitor, max_epochs=1, strategy="ddp")
    made.fit(Net(), loader())
    metrics = made.callback_metrics
    assert metrics["train/samples_per_sec"] == pytest.approx(2 * metrics["train/device/samples_per_sec"])
    return metrics["train/samples"]


def test_over_all_ranks(tmp_path: Path) -> None:
    assert on_two_ranks(throughput, tmp_path) == [16.0, 16.0]


# ------------------------------------------------------------------------------------------------------------- device


def test_device_stats_in_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    made = trainer(tmp_path, DeviceStatsMonitor(), max_epochs=1, logger=True)
    made.fit(Net(), loader())
    assert [int(row["step"]) for row in table(made) if row["DeviceStatsMonitor.on_train_batch_end/cpu_percent"]] == [
        4,
        8,
    ]
    made = trainer(tmp_path, DeviceStatsMonitor(cpu_stats=False), max_epochs=1)
    made.fit(Net(), loader())
    assert not [name for name in made.callback_metrics if name.startswith("DeviceStatsMonitor")]


# ------------------------------------------------------------------------------------------------------- accumulation


def test_updates_grow_and_shrink_with_the_epochs(tmp_path: Path) -> None:
    made = trainer(tmp_path, GradientAccumulationScheduler({1: 4, 3: 2}))
    made.fit(Net(), loader())
    assert made.global_step == 8 + 2 + 2 + 4
    assert made.accumulate_grad_batches == 2


def weights(net: Net) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in net.state_dict().values()])


@pytest.mark.parametrize("at", ["9", "10", "12"])
def test_resumed_it_ends_the_same(tmp_path: Path, at: str) -> None:
    def fit(root: Path, ckpt_path: str | None = None) -> torch.Tensor:
        torch.manual_seed(5)
        net, plan = Net(), GradientAccumulationScheduler({1: 4, 2: 2})
        saver = Checkpoint(root / "ck", every_n_updates=1, save_top_k=-1, filename="{update}")
        trainer(root, plan, saver, max_epochs=3).fit(net, loader(), ckpt_path=ckpt_path)
        return weights(net)

    whole = fit(tmp_path / "whole")
    assert torch.equal(whole, fit(tmp_path / "rest", str(tmp_path / "whole" / "ck" / at)))


@pytest.mark.parametrize("scheduling", [{}, {0: 0}, {-1: 2}, {0: 1.5}])
def test_wrong_schedules(scheduling: Any) -> None:
    with pytest.raises(ConfigurationError, match="scheduling="):
        GradientAccumulationScheduler(scheduling)


def test_not_beside_a_global_batch_size(tmp_path: Path) -> None:
    made = trainer(tmp_path, GradientAccumulationScheduler({0: 2}), global_batch_size=8)
    with pytest.raises(ConfigurationError, match="use one of them"):
        made.fit(Net(), loader())
