"""What Trivet costs beside the plain PyTorch loop, and what other trainers cost.

    pip install -e '.[peers]'
    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/speed.py --quick
    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/speed.py --write docs/performance.md --json speed.json

All contenders train the same model on the same batches in one process with one thread, round by round, in an order that
turns; the first round warms up and is dropped. The clock is read in one place for all, when a batch is asked for: a
step is the median from one batch to the next, or, where work is done every so many steps, the process's own time from
the first tenth to the last batch. Reported are medians over rounds of the ratio, or the difference, to the plain loop
of the same round. "plain again" is the plain loop once more: its distance from 1 is the noise, and a table where it is
beyond 3 % is measured again, at most three times. Whoever ends with other weights than the plain loop ends the run.
Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import itertools
import json
import logging
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pages
import speed_report
import speed_tasks as tasks
import torch
from speed_tasks import Asked, Task

PEERS = {  # what has to be installed for a contender
    "plain": "torch", "plain again": "torch", "trivet": "trivet", "plain, by hand": "tqdm",
    "ignite": "ignite", "fabric": "lightning_fabric", "accelerate": "accelerate", "huggingface": "transformers",
    "lightning": "pytorch_lightning",
}  # fmt: skip
FILES = {"plain again": "plain", "plain, by hand": "plain_full"}
NOISE = 0.03
Result = dict[str, list[dict[str, float]]]  # by contender: the figures of each round


def contender(name: str) -> ModuleType:
    module = importlib.import_module(f"contenders.{FILES.get(name, name)}")
    for library in ("pytorch_lightning", "lightning_fabric", "accelerate", "transformers", "ignite"):
        logging.getLogger(library).setLevel(logging.ERROR)  # they set their levels when they are imported
    warnings.filterwarnings("ignore")
    return module


def measure(fit: Callable[[Task, Asked], torch.nn.Module], task: Task, asked: Asked) -> tuple[dict[str, float], Any]:
    """One fit: microseconds from batch to batch (the median, and the process's own time) and seconds of the whole."""
    gc.collect()
    start = time.perf_counter()
    model = fit(task, asked)
    seconds = time.perf_counter() - start
    assert task.data is not None
    times = task.data.times[max(1, len(task.data.times) // 10) :]
    gaps = [(after - before) * 1e6 for before, after in itertools.pairwise(times)]
    (first, begin), (last, end) = task.data.cpu[0], task.data.cpu[-1]
    figures = {"median": statistics.median(gaps), "cpu": (end - begin) / (last - first) * 1e6, "seconds": seconds}
    return figures, [parameter.detach().clone() for parameter in model.parameters()]


def interleaved(names: list[str], make: Callable[[], Task], asked: dict[str, Asked], rounds: int) -> Result:
    """The figures of each round. ``asked`` is by contender, and the plain loop's for whoever is not named."""
    fits = {name: contender(name).fit for name in names}
    found: Result = {name: [] for name in names}
    for number in range(rounds + 1):
        turn, weights = number % len(names), {}
        for name in names[turn:] + names[:turn]:
            with tempfile.TemporaryDirectory() as folder:
                given = asked.get(name, asked["plain"])
                task = make()
                figures, weights[name] = measure(fits[name], task, Asked(**{**vars(given), "folder": Path(folder)}))
            if number:
                found[name].append(figures)
        for name, tensors in weights.items():
            if not all(map(torch.equal, tensors, weights["plain"])):
                raise SystemExit(f"{task.name}: {name} ended with other weights than the plain loop")
    return found


def summary(found: Result) -> dict[str, dict[str, float]]:
    """Of each contender: medians over the rounds of its figures, and of ratio and difference to the plain loop."""
    rows = {}
    for name, results in found.items():
        row = {}
        for key in results[0]:
            pairs = [(mine[key], plain[key]) for mine, plain in zip(results, found["plain"], strict=True)]
            row[key] = statistics.median(mine for mine, _ in pairs)
            row[f"{key} over"] = statistics.median(mine - plain for mine, plain in pairs)
            row[f"{key} ratio"] = statistics.median(mine / plain for mine, plain in pairs)
        rows[name] = row
    return rows


class Runner:
    """Measures one table after the other."""

    def __init__(self, names: list[str], rounds: int, scale: float, tries: int) -> None:
        self.names, self.rounds, self.scale, self.tries = names, rounds, scale, tries
        self.tables: dict[str, Any] = {}

    def table(
        self, title: str, make: Callable[[], Task], asked: Asked, *, key: str = "median", full: bool = False
    ) -> None:
        """``full``: the plain loop does without what the others are asked for."""
        names = [
            name for name in self.names
            if asked.names <= contender(name).SUPPORTS and (full or name != "plain, by hand")
        ]  # fmt: skip
        wanted = {"plain": Asked(), "plain again": Asked()} if full else {"plain": asked}
        everybody = {name: wanted.get(name, asked) for name in names}
        for _ in range(self.tries):
            found = interleaved(names, make, everybody, self.rounds)
            rows = summary(found)
            if "plain again" not in rows or abs(rows["plain again"][f"{key} ratio"] - 1) <= NOISE:
                break
        self.tables[title] = {"rows": rows, "rounds": found, "key": key, "load": os.getloadavg()[0]}
        print(f"\n{title}\n{speed_report.table(rows, key)}", file=sys.stderr, flush=True)

    def steps(self, count: int) -> int:
        return max(50, int(count * self.scale))

    # ---------------------------------------------------------------------------------------------------- the suites

    def step(self) -> None:
        self.table("A step of a tiny model, everything off", lambda: tasks.tiny(self.steps(2000)), Asked())

    def conveniences(self) -> None:
        for title, output in (("to a file", to_file), ("to a terminal", to_terminal)):
            with output():
                self.table(
                    f"The same with progress bar, CSV logger, three metrics and a checkpoint, {title}",
                    lambda: tasks.tiny(self.steps(2000)), Asked(conveniences=True), key="cpu", full=True,
                )  # fmt: skip

    def growth(self) -> None:
        for what, asked in {
            "1 metric": Asked(metrics=1), "10 metrics": Asked(metrics=10), "100 metrics": Asked(metrics=100),
            "50 callbacks without hooks": Asked(empty_callbacks=50),
            "50 callbacks, two hooks of each": Asked(callbacks=50),
        }.items():  # fmt: skip
            self.table(f"A step with {what}", lambda: tasks.tiny(self.steps(600)), asked)
        self.table(
            "A step of 1000 parameter tensors, with clipping", lambda: tasks.many(1000, self.steps(60)), Asked(clip=1.0)
        )

    def fits(self) -> None:
        for make in (tasks.digits, tasks.gpt, tasks.resnet)[: 1 if self.tries == 1 else 3]:
            for bf16 in (False, True):
                title = f"A whole fit: {make().name}, {'bf16-mixed' if bf16 else 'fp32'}"
                self.table(title, make, Asked(bf16=bf16), key="seconds")


@contextlib.contextmanager
def to_file() -> Iterator[None]:
    with tempfile.TemporaryFile("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(Tee(file)):
        yield


@contextlib.contextmanager
def to_terminal() -> Iterator[None]:
    reader, writer = pty.openpty()
    sink = subprocess.Popen(["cat"], stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(reader)
    try:
        with (
            os.fdopen(writer, "w") as terminal,
            contextlib.redirect_stdout(terminal),
            contextlib.redirect_stderr(Tee(terminal)),
        ):
            yield
    finally:
        sink.kill()
        sink.wait()


class Tee:
    """Standard error while output is measured: bars go where the output goes, our tables to the user."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, text: str) -> int:
        ours = text.startswith("\nThe same")
        return int((sys.__stderr__ if ours and sys.__stderr__ else self.file).write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


SUITES = ("step", "conveniences", "growth", "fits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="*", default=SUITES, choices=SUITES)
    parser.add_argument("--contenders", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: within five minutes")
    parser.add_argument("--write", type=Path, help="put the tables into this page")
    parser.add_argument("--json", type=Path, help="all figures of all rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["plain", "plain again", *(n for n in options.contenders if not n.startswith("plain ") and n != "plain")]
    missing = [name for name in names if importlib.util.find_spec(PEERS[name]) is None]
    if missing:
        print(f"left out, since not installed (pip install -e '.[peers]'): {', '.join(missing)}", file=sys.stderr)
    given = [name for name in names if name not in missing]
    runner = Runner(given, 3, 0.25, 1) if options.quick else Runner(given, options.rounds, 1.0, 3)
    every: dict[str, Any] = {}
    for suite in options.suites:
        runner.tables = {}
        getattr(runner, suite)()
        every |= runner.tables
        text = speed_report.page(runner.tables, runner.rounds, [PEERS[name] for name in runner.names])
        if options.json:
            options.json.write_text(json.dumps(every, indent=1))
        if options.write:
            pages.put(options.write, text, f"<!-- {suite}: begin -->", f"<!-- {suite}: end -->")
        print(f"{text}\n")


if __name__ == "__main__":
    main()
