"""What a step costs on a device: Trivet against a loop by hand, precisions against float32, memory, and waiting.

Turn by turn, so that a clock that changes meets all alike; medians over rounds. `run.py` prints the table.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

PRECISIONS: dict[str, Any] = {
    "fp32": {"name": "fp32", "matmul": "highest"},
    "fp32, TF32": {"name": "fp32", "matmul": "high"},
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "fp16-mixed",
    "bf16-true": "bf16-true",
    "fp8-mixed": {"name": "fp8-mixed", "smallest": 16},
}
SYNCHRONISES = "called a synchronizing CUDA operation"


@dataclass(frozen=True)
class Sizes:
    """Of the model, and how long is measured."""

    width: int = 4096
    layers: int = 6
    batch: int = 4096
    warm_up: int = 8
    updates: int = 20
    rounds: int = 5


SMALL = Sizes(width=32, layers=1, batch=16, warm_up=2, updates=3, rounds=1)


@dataclass
class Row:
    """One contender: milliseconds of an update by round, the most bytes, and waits of the host in an update."""

    name: str
    steps: list[float] = field(default_factory=list)
    peak: int = 0
    waits: float | None = None
    failed: str = ""

    @property
    def step(self) -> float:
        return median(self.steps)


class Noise(Dataset[Tensor]):
    """The same batch again and again, put together and pinned before: what is timed is the device's step."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.updates = sizes.warm_up + sizes.updates
        self.batch = torch.randn(sizes.batch, sizes.width, pin_memory=device == "cuda")

    def __len__(self) -> int:
        return self.updates

    def __getitem__(self, index: int) -> Tensor:
        return self.batch


def network(sizes: Sizes) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(sizes.width, sizes.width), nn.GELU()) for _ in range(sizes.layers)]
    return nn.Sequential(*blocks, nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.width))


class Clock(trivet.Callback):
    """Takes the time from the end of the warm-up, and counts what makes the host wait in between."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device, self.step = sizes, device, 0.0
        self.waits: float | None = None
        self.caught: Any = None

    def on_update_end(self, trainer: Any, module: Any) -> None:
        done = trainer.progress.update + trainer.progress.skipped
        if done == self.sizes.warm_up:
            self.begin()
        elif done == self.sizes.warm_up + self.sizes.updates:
            self.end()

    def begin(self) -> None:
        synchronize(self.device)
        if self.device == "cuda":
            self.caught = warnings.catch_warnings(record=True)
            self.seen = self.caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        self.started = time.perf_counter()

    def end(self) -> None:
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            self.waits = sum(SYNCHRONISES in str(one.message) for one in self.seen) / self.sizes.updates
        synchronize(self.device)
        self.step = 1000 * (time.perf_counter() - self.started) / self.sizes.updates


class Model(trivet.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.net = network(sizes)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def by_trivet(precision: Any, sizes: Sizes, device: str, compiled: bool = False) -> Clock:
    clock = Clock(sizes, device)
    trainer = trivet.Trainer(
        accelerator=device, precision=precision, max_epochs=1, callbacks=[clock], log_every_n_steps=10**6, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, compile=compiled,
    )  # fmt: skip
    trainer.fit(Model(sizes), loader(sizes, device))
    return clock


def loader(sizes: Sizes, device: str) -> DataLoader[Tensor]:
    return DataLoader(Noise(sizes, device), batch_size=None)


def by_hand(dtype: torch.dtype, sizes: Sizes, device: str) -> Clock:
    """The same training, written out."""
    clock, net = Clock(sizes, device), network(sizes).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    for number, batch in enumerate(loader(sizes, device), 1):
        batch = batch.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = nn.functional.mse_loss(net(batch), batch)
        loss.backward()
        optimizer.step()
        if number == sizes.warm_up:
            clock.begin()
    clock.end()
    return clock


def contenders(sizes: Sizes, device: str) -> dict[str, Callable[[], Clock]]:
    found: dict[str, Callable[[], Clock]] = {
        "by hand, fp32": lambda: by_hand(torch.float32, sizes, device),
        "by hand, bf16": lambda: by_hand(torch.bfloat16, sizes, device),
    }
    for name, precision in PRECISIONS.items():
        found[name] = lambda precision=precision: by_trivet(precision, sizes, device)  # type: ignore[misc]
    if device == "cuda":
        for name in ("bf16-mixed", "fp8-mixed"):
            precision = PRECISIONS[name]
            found[f"{name}, compiled"] = lambda precision=precision: by_trivet(precision, sizes, device, True)  # type: ignore[misc]
    return found


def measure(sizes: Sizes, device: str, limit_s: float) -> list[Row]:
    """All contenders, turn by turn, as many rounds as the time allows; one that fails says why and is left out.

    The first round may take half a minute more, since it compiles."""
    runs, started = contenders(sizes, device), time.monotonic()
    rows = {name: Row(name) for name in runs}
    for number in range(sizes.rounds):
        for name, run in runs.items():
            row = rows[name]
            if time.monotonic() - started > limit_s + (0 if number else 30):
                row.failed = row.failed or ("" if row.steps else "no time was left")
            if row.failed or (number and time.monotonic() - started > limit_s):
                continue
            gc.collect()  # of the one before, whose module and trainer know each other
            torch.compiler.reset()  # or the module of each round would be one more variant of one compiled step
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                clock = run()
            except Exception as error:
                row.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100]
                continue
            row.steps.append(clock.step)
            row.waits = clock.waits
            row.peak = max(row.peak, torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    return list(rows.values())


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown. ``against``: the loop by hand in the same arithmetic, or Trivet's own fp32."""
    by_name = {row.name: row for row in rows if row.steps}
    hands = {"fp32": "by hand, fp32", "bf16-mixed": "by hand, bf16"}
    lines = [
        "| | ms an update | against by hand | speed against fp32 | peak MiB | waits of the host an update |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row.steps:
            lines.append(f"| {row.name} | failed: {row.failed} | | | | |")
            continue
        hand, base = by_name.get(hands.get(row.name, "")), by_name.get("fp32")
        cells = [
            f"{row.step:.2f}",
            f"{row.step / hand.step:.3f}" if hand else "",
            f"{base.step / row.step:.2f}" if base else "",
            f"{row.peak / 2**20:.0f}" if row.peak else "",
            "" if row.waits is None else f"{row.waits:g}",
        ]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines


def broken(rows: Sequence[Row]) -> list[str]:
    """What the table says that must not be: a host that waits more often than it has to."""
    allowed = {"fp16-mixed": 1.0}
    return [
        f"{row.name}: the host waits {row.waits:g} times an update, {allowed.get(row.name, 0.0):g} are allowed"
        for row in rows
        if row.waits is not None and not row.name.startswith("by hand") and row.waits > allowed.get(row.name, 0.0)
    ]
