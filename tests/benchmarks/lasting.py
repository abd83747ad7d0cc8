"""What does not grow: a step with the length of the loader, the steps run, the parameters and the ranks; memory.

    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/lasting.py --write docs/performance.md

Each figure is taken in a process of its own, with one thread. Times are medians, those beside the plain loop medians of
rounds that take turns. The ranks are torch's fake process group, whose collectives end at once: what is timed is the
host's part of an update, which deals and reads a batch, logs three metrics and joins them every 50 updates. Memory is
what the operating system says, the peak of the whole process.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import speed_report
import speed_tasks as tasks
import torch
from speed_tasks import Task
from torch import nn

START, END = "<!-- lasting: begin -->", "<!-- lasting: end -->"


def by_hand(task: Task, steps: int) -> nn.Module:
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for x, y in itertools.islice(task.loader(), steps):
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()
    return model


def with_trivet(task: Task, steps: int) -> nn.Module:
    import trivet
    from contenders.trivet import Net

    net = Net(task, 0, False)
    trainer = trivet.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(net, task.loader())
    return net.net


FITS: dict[str, Callable[[Task, int], nn.Module]] = {"plain": by_hand, "trivet": with_trivet}


def gaps(fit: Callable[[Task, int], nn.Module], task: Task, steps: int) -> list[float]:
    """Microseconds from batch to batch."""
    gc.collect()
    fit(task, steps)
    assert task.data is not None
    return [(after - before) * 1e6 for before, after in itertools.pairwise(task.data.times)]


def over(make: Callable[[], Task], steps: int, rounds: int) -> tuple[float, float]:
    """Microseconds of the plain loop's step, and what Trivet's takes beyond it."""
    plain, more = [], []
    for number in range(rounds + 1):
        order = list(FITS)[:: 1 if number % 2 else -1]
        found = {name: statistics.median(gaps(FITS[name], make(), steps)[steps // 10 :]) for name in order}
        if number:
            plain.append(found["plain"])
            more.append(found["trivet"] - found["plain"])
    return statistics.median(plain), statistics.median(more)


# ------------------------------------------------------------------------------------- figures, in a process of its own


def length(batches: int, rounds: int) -> Any:
    return over(lambda: tasks.tiny(batches), 1000, rounds)


def parameters(tensors: int, rounds: int) -> Any:
    return over(lambda: tasks.many(tensors, 20000), max(60, 20000 // tensors), rounds)


def run(name: str, steps: int) -> Any:
    """The step at the begin and at the end of a long run, and MiB of the process then; times are not kept."""
    task, seen, memory = tasks.tiny(steps), [], {}
    span = steps // 10
    read = tasks.Batches.__getitem__

    def watching(data: tasks.Batches, index: int) -> Any:
        if index % span == 0:
            memory[index] = resident()
        if len(data.times) == span:
            seen.append(statistics.median(b - a for a, b in itertools.pairwise(data.times)) * 1e6)
            data.times.clear()
        return read(data, index)

    tasks.Batches.__getitem__ = watching  # type: ignore[method-assign]
    FITS[name](task, steps)
    return seen[0], seen[-1], memory[span], memory[steps - span]


def fits(name: str, count: int) -> Any:
    """MiB after the fifth fit of a process and after the last."""
    held = []
    for _ in range(count):
        FITS[name](tasks.tiny(50), 50)
        gc.collect()
        held.append(resident())
    return held[4], held[-1]


def peak(name: str) -> Any:
    """MiB at most, of a process that does nothing but this fit."""
    FITS[name](tasks.gpt(10), 10)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ranks(size: int, updates: int) -> Any:
    """Microseconds of an update's host work by its part, as rank 0 of so many, and milliseconds of planning once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils.data import DataLoader, TensorDataset
    from trivet.data.train import TrainData
    from trivet.launch.group import Group
    from trivet.launch.world import World
    from trivet.metrics import STEP, Metrics

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    group = Group(World(0, size, 0, min(size, 8)), None, torch.device("cpu"))
    # more than is read: at its end torch draws another permutation, whose length has nothing to do with the ranks
    loader = DataLoader(TensorDataset(torch.zeros(size * (updates + 2) * 4, 1)), batch_size=4, shuffle=True)
    begin = time.perf_counter()
    data = TrainData(loader, rank=0, world_size=size, accumulate=1, seed=0)
    planning = (time.perf_counter() - begin) * 1e3
    gc.disable()  # else one of the parts has a collection of all that was imported, by chance
    metrics = Metrics("training", group)
    metrics.defaults = STEP
    value, times = torch.zeros(()), [time.perf_counter()]
    logging, first = 0.0, updates // 10 * 2
    for number, window in enumerate(itertools.islice(data.epoch(0), updates), 1):
        begin = time.perf_counter()
        metrics.weight = window.batches[0].samples
        for name in ("a", "b", "c"):
            metrics.log(name, value, (False, True, None, True, "mean", True, False), None, True, None)
        if number % 50 == 0:
            metrics.step_row()
        now = time.perf_counter()
        logging += now - begin if number > first else 0.0
        times.append(now)
    dist.destroy_process_group()
    logging *= 1e6 / (updates - first)
    whole = (times[-1] - times[first]) * 1e6 / (updates - first)
    return whole - logging, logging, planning


def resident() -> float:
    """MiB of this process that are in memory."""
    pages_ = int(Path("/proc/self/statm").read_text().split()[1])
    return pages_ * resource.getpagesize() / 2**20


def of_its_own(what: Callable[..., Any], *args: Any) -> Any:
    """The figure of a process that takes nothing else."""
    command = [sys.executable, __file__, "--figure", json.dumps([what.__name__, *args])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# -------------------------------------------------------------------------------------------------------------- tables


def grown(quick: bool, rounds: int) -> str:
    lines = ["| | the plain loop's step, µs | Trivet's over it, µs |", "|---|---|---|"]
    for batches in (10**3, 10**6):
        plain, more = of_its_own(length, batches, rounds)
        lines.append(f"| a loader of {batches:,} batches | {plain:.0f} | {more:.1f} |")
    steps = 10_000 if quick else 100_000
    (first, last, _, _), (mine, later, _, _) = (of_its_own(run, name, steps) for name in FITS)
    lines.append(f"| the first tenth of {steps:,} steps | {first:.0f} | {mine - first:.1f} |")
    lines.append(f"| the last tenth | {last:.0f} | {later - last:.1f} |")
    for tensors in (10, 100, 1000):
        plain, more = of_its_own(parameters, tensors, rounds)
        lines.append(f"| {tensors} parameter tensors | {plain:.0f} | {more:.1f} |")
    return "\n".join(lines)


def world(quick: bool) -> str:
    lines = ["| ranks | dealing and reading, µs an update | logging, µs an update | once, ms |", "|---|---|---|---|"]
    for size in (1, 8, 64, 512):
        data, logging, planning = of_its_own(ranks, size, 250 if quick else 1000)
        lines.append(f"| {size} | {data:.0f} | {logging:.0f} | {planning:.1f} |")
    return "\n".join(lines)


def memory(quick: bool, rounds: int) -> str:
    steps, count = (10_000, 10) if quick else (100_000, 20)
    lines = ["| MiB | plain loop | Trivet | more |", "|---|---|---|---|"]
    tops = {name: statistics.median(of_its_own(peak, name) for _ in range(rounds)) for name in FITS}
    lines.append(_row("peak of a fit, GPT", tops))
    long = {name: of_its_own(run, name, steps) for name in FITS}
    grew = {name: one[3] - one[2] for name, one in long.items()}
    lines.append(_row(f"growth over the steps {steps // 10:,} to {steps // 10 * 9:,}", grew))
    several = {name: of_its_own(fits, name, count) for name in FITS}
    grew = {name: last - fifth for name, (fifth, last) in several.items()}
    lines.append(_row(f"growth from the 5th to the {count}th fit of a process", grew))
    return "\n".join(lines)


def _row(what: str, of: dict[str, float]) -> str:
    return f"| {what} | {of['plain']:.1f} | {of['trivet']:.1f} | {of['trivet'] - of['plain']:.1f} |"


def main() -> None:
    parser = pages.parser(__doc__, 7)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, three rounds")
    parser.add_argument("--figure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.figure:
        name, *args = json.loads(options.figure)
        print(json.dumps(globals()[name](*args)))
        return
    rounds = 3 if options.quick else options.rounds
    parts = [grown(options.quick, rounds), world(options.quick), memory(options.quick, rounds)]
    about = speed_report.about("lasting.py", ["torch", "trivet"], rounds, os.getloadavg()[:1])
    text = "\n\n".join([about, *parts])
    pages.show(text, options.write, START, END)


if __name__ == "__main__":
    main()
