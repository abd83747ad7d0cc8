"""How long an import of Trivet's takes, and a command that only talks.

    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/imports.py --write docs/performance.md

Each runs in a process of its own, in turn with the others, in an order that turns; shown are medians over rounds, of an
import the seconds within the process, of a command those of the whole process. The first round fills the caches and is
dropped.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import pages
import speed_report

START, END = "<!-- imports: begin -->", "<!-- imports: end -->"
TIMED = """
import sys, time
{before}
begin = time.perf_counter()
{timed}
print(time.perf_counter() - begin)
"""
TORCH = ["-c", "import torch"]
# what runs, and how many seconds it may take; what is timed within a process prints them
STARTS: dict[str, tuple[list[str], float]] = {
    "`import trivet`": (["-c", TIMED.format(before="", timed="import trivet")], 0.03),
    "`from trivet import Trainer`, after torch": (
        ["-c", TIMED.format(before="import torch", timed="from trivet import Trainer")], 0.06,
    ),
    "`trivet --help`": (["-m", "trivet", "--help"], 0.3),
    "`trivet plugins`": (["-m", "trivet", "plugins"], 0.3),
    "`trivet fit --help`, beyond `import torch`": (["-m", "trivet", "fit", "--help"], 1.0),
}  # fmt: skip


def seconds(arguments: list[str]) -> float:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=variables)
    whole = time.perf_counter() - begin
    return float(done.stdout) if arguments[0] == "-c" and done.stdout else whole


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds by round."""
    commands = {"torch": TORCH, **{name: command for name, (command, _) in STARTS.items()}}
    found: dict[str, list[float]] = {name: [] for name in STARTS}
    for number in range(rounds + 1):
        turn = number % len(commands)
        order = list(commands)
        times = {name: seconds(commands[name]) for name in order[turn:] + order[:turn]}
        for name in STARTS if number else ():
            found[name].append(times[name] - (times["torch"] if "beyond" in name else 0.0))
    return found


def table(found: dict[str, list[float]]) -> str:
    lines = ["| | ms | at most, ms |", "|---|---|---|"]
    for name, (_, bound) in STARTS.items():
        lines.append(f"| {name} | {statistics.median(found[name]) * 1e3:.0f} | {bound * 1e3:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = pages.parser(__doc__, 11)
    options = parser.parse_args()
    about = speed_report.about("imports.py", ["torch", "trivet"], options.rounds, os.getloadavg()[:1])
    text = f"{about}\n\n{table(measure(options.rounds))}"
    pages.show(text, options.write, START, END)


if __name__ == "__main__":
    main()
