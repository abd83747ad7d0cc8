"""Everything that wants a CUDA device, in one command that ends within eight minutes and prints one table.

    python tests/device/run.py            on a machine with a device, with '.[test]' installed and a PyTorch that has
                                          CUDA; without a device it says so and is done
    python tests/device/run.py --device cpu --small    the benchmark alone, to see that it runs

The exit code is 1 where a test failed or the host waits more often than it has to.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "4")

import benchmark
import torch
from trivet.accelerators.cuda import CUDA

HERE = Path(__file__).resolve().parent
LIMIT_S = 465.0  # of the whole, of which the tests get most
TESTS_S = 270.0


def conformance() -> tuple[str, bool]:
    """The suites: a line for the table, and whether they passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--trivet-cells", "few", str(HERE)]
    try:
        ran = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=TESTS_S, check=False)
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        print(text[-3000:])
        return f"stopped after {TESTS_S:g} s", False
    print(ran.stdout[-6000:], ran.stderr[-2000:], sep="\n")
    summary = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*?)(?: =+)?$", ran.stdout, re.MULTILINE)
    return summary[-1] if summary else f"exit code {ran.returncode}", ran.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that take a second, to see that it runs")
    parser.add_argument("--no-tests", action="store_true", help="the benchmark alone")
    options = parser.parse_args()
    started, head, good = time.monotonic(), [], True
    if options.device == "cuda":
        if not CUDA().is_available():
            print(f"no CUDA device: {CUDA().unavailable_reason()}. Nothing was run.")
            return 0
        if not options.no_tests:
            text, good = conformance()
            head.append(f"Tests: {text}.")
        major, minor = torch.cuda.get_device_capability()
        head.append(f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, torch {torch.__version__}.")
    sizes = benchmark.SMALL if options.small else benchmark.Sizes()
    rows = benchmark.measure(sizes, options.device, LIMIT_S - (time.monotonic() - started) - 60)
    wrong = benchmark.broken(rows)
    print("\n".join(["", *head, "", *benchmark.table(rows), "", *wrong, f"{time.monotonic() - started:.0f} s"]))
    return 0 if good and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
