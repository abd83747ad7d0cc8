"""What a metric, a callback and a hook add to a step of Trivet's.

    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/prices.py --write docs/performance.md

Trivet's Trainer trains the tiny model of `speed.py` with and without each of them, round by round in an order that
turns; shown are medians over rounds of the difference to the step without any in the same round. "nothing" is that step
once more: its price is the noise.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import pages
import speed
import speed_report
import speed_tasks as tasks
import torch
from speed_tasks import Asked

START, END = "<!-- prices: begin -->", "<!-- prices: end -->"
ADDED: dict[str, tuple[Asked, int, float]] = {  # what is added, how many there are, and what each may cost
    "nothing": (Asked(), 1, 0.0),
    "1 logged metric": (Asked(metrics=1), 1, 2.0),
    "100 logged metrics": (Asked(metrics=100), 1, 200.0),
    "50 callbacks without hooks": (Asked(empty_callbacks=50), 1, 10.0),
    "50 callbacks with two hooks each": (Asked(callbacks=50), 100, 0.3),
}


def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds that each adds, by round."""
    fit = speed.contender("trivet").fit
    every: dict[str, Asked] = {"": Asked(), **{name: asked for name, (asked, _, _) in ADDED.items()}}
    found: dict[str, list[float]] = {name: [] for name in ADDED}
    for number in range(rounds + 1):
        order = list(every)
        order = order[number % len(order) :] + order[: number % len(order)]
        medians = {}
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                asked: Any = Asked(**{**vars(every[name]), "folder": Path(folder)})
                figures, _ = speed.measure(fit, tasks.tiny(steps), asked)
                medians[name] = figures["median"]
        for name in found if number else ():
            found[name].append(medians[name] - medians[""])
    return found


def table(found: dict[str, list[float]]) -> str:
    lines = ["| added to a step | µs | each, µs | at most, µs |", "|---|---|---|---|"]
    for name, (_, count, bound) in ADDED.items():
        price = statistics.median(found[name])
        limit = f"{bound:g}" if bound else ""
        lines.append(f"| {name} | {price:.2f} | {price / count:.2f} | {limit} |")
    return "\n".join(lines)


def main() -> None:
    parser = pages.parser(__doc__, 15)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.rounds, options.steps)
    about = speed_report.about("prices.py", ["torch", "trivet"], options.rounds, os.getloadavg()[:1])
    text = f"{about}\n\n{table(found)}"
    pages.show(text, options.write, START, END)


if __name__ == "__main__":
    main()
