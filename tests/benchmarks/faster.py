"""What a fused optimizer and ``torch.compile`` bring: options that change results by rounding, and so are never silent.

    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/faster.py --write docs/performance.md

A loop by hand and Trivet's Trainer train the same model, both with the option, round by round in an order that turns.
A step is the median from one batch to the next, after compiling; shown are medians over rounds, and of the ratio to the
loop by hand without any option. torch's Inductor needs a C++ compiler; where it fails, the reason is shown.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pages
import speed_report
import speed_tasks as tasks
import torch
import trivet
from speed_tasks import Task
from torch import nn

START, END = "<!-- faster: begin -->", "<!-- faster: end -->"
WARMING = 3  # batches in which torch compiles


@dataclass(frozen=True)
class Chosen:
    """The options of a training."""

    fused: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        found = [name for name, on in (("fused AdamW", self.fused), ("compile", self.compiled)) if on]
        return ", ".join(found) or "as it is"


CHOICES = [Chosen(), Chosen(fused=True), Chosen(compiled=True), Chosen(fused=True, compiled=True)]


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def by_hand(task: Task, chosen: Chosen) -> None:
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    called: Callable[..., Any] = torch.compile(model) if chosen.compiled else model
    for x, y in task.loader():
        optimizer.zero_grad()
        task.loss(called(x), y).backward()
        optimizer.step()


def with_trivet(task: Task, chosen: Chosen) -> None:
    from contenders.trivet import Net

    trainer = trivet.Trainer(
        accelerator="cpu", max_epochs=1, compile=chosen.compiled, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Net(task, 0, False), task.loader())


FITS = {"by hand": by_hand, "Trivet": with_trivet}


def step(fit: Callable[[Task, Chosen], None], make: Callable[[], Task], chosen: Chosen) -> float:
    """Milliseconds."""
    torch.compiler.reset()
    gc.collect()
    task = replace(make(), optimizer=fused) if chosen.fused else make()
    fit(task, chosen)
    assert task.data is not None
    return statistics.median(b - a for a, b in itertools.pairwise(task.data.times[WARMING:])) * 1e3


def measure(make: Callable[[], Task], rounds: int) -> tuple[dict[tuple[str, Chosen], list[float]], dict[Chosen, str]]:
    """Milliseconds by contender, option and round, and why an option was left out."""
    found: dict[tuple[str, Chosen], list[float]] = {}
    failed: dict[Chosen, str] = {}
    for number in range(rounds):
        cases = [(name, chosen) for chosen in CHOICES for name in FITS]
        turn = number % len(cases)
        for name, chosen in cases[turn:] + cases[:turn]:
            if chosen in failed:
                continue
            try:
                found.setdefault((name, chosen), []).append(step(FITS[name], make, chosen))
            except RuntimeError as error:  # torch's own: no compiler, or one that does not work
                failed[chosen] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return found, failed


def table(found: dict[tuple[str, Chosen], list[float]], failed: dict[Chosen, str]) -> str:
    lines = ["| | by hand, ms | of it as it is | Trivet, ms | of it as it is |", "|---|---|---|---|---|"]
    plain = found["by hand", Chosen()]
    for chosen in CHOICES:
        cells = [chosen.name]
        if chosen in failed:
            cells += [failed[chosen].replace("|", "/"), "", "", ""]
        for name in () if chosen in failed else FITS:
            times = found[name, chosen]
            ratio = statistics.median(mine / its for mine, its in zip(times, plain, strict=True))
            cells += [f"{statistics.median(times):.1f}", f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = pages.parser(__doc__, 5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    parts = [speed_report.about("faster.py", ["torch", "trivet"], options.rounds, os.getloadavg()[:1])]
    makes: list[Callable[[], Task]] = [lambda: tasks.gpt(20), lambda: tasks.many(1000, 20)]
    for make in makes:
        parts.append(f"**{make().name}**\n\n{table(*measure(make, options.rounds))}")
    text = "\n\n".join(parts)
    pages.show(text, options.write, START, END)


if __name__ == "__main__":
    main()
