"""How long saving and loading a state takes, how long training stands still, and how much memory it needs.

    OMP_NUM_THREADS=1 python tests/benchmarks/checkpoint.py
    python tests/benchmarks/checkpoint.py --lightning PYTHON --write docs/checkpoints.md --json checkpoint.json

Trivet, torch.save, torch.distributed.checkpoint (DCP) and Lightning save the same weights with Adam's state, turn by
turn, each in a process of its own. Figures are medians over rounds, of times divided by that of torch.save or of DCP in
the same round. Lightning is run by the interpreter of ``--lightning`` (or of the variable TRIVET_LIGHTNING_PYTHON).

``load`` is what a run does that goes on: the weights are there, the optimizer has no state yet, and no memory for it
was touched before. Each contender makes that state; DCP, which fills what is there, in the cheapest way. ``reload``:
the state is there. DCP overwrites it, the others make another. Nobody but Trivet compares checksums, or can give the
old weights back if the rest of the checkpoint is of no use. The JSON holds page faults and processor time, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import pages
import torch

START, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"
HERE = Path(__file__).resolve().parent
# what is asked of whom in a round, in this order, from another place on in each
ROUND = (
    ("torch", "save"), ("dcp", "save"), ("trivet", "save"), ("trivet", "unsummed"), ("lightning", "save"),
    ("copy", "async"), ("dcp", "async"), ("trivet", "async"),
    ("torch", "load"), ("dcp", "load"), ("trivet", "load"), ("lightning", "load"),
    ("torch", "reload"), ("dcp", "reload"), ("trivet", "reload"), ("lightning", "reload"),
)  # fmt: skip
ROWS = {
    "save": {"torch": "torch.save", "dcp": "DCP", "trivet": "Trivet", "lightning": "Lightning"},
    "unsummed": {"trivet": "Trivet without checksums"},
    "async": {"copy": "a copy into memory that is there", "dcp": "DCP's async_save", "trivet": "Trivet, save_async"},
    "load": {"torch": "torch.load", "dcp": "DCP", "trivet": "Trivet", "lightning": "Lightning"},
    "reload": {"torch": "torch.load", "dcp": "DCP", "trivet": "Trivet", "lightning": "Lightning"},
}


class Contender:
    """A process that answers."""

    def __init__(self, name: str, python: str, place: Path, megabytes: int) -> None:
        place.mkdir()
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(HERE / "checkpoint_contenders.py"), name, str(place), str(megabytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.can = self._read()["ready"]

    def ask(self, what: str) -> dict[str, float]:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Answers by ``contender what``, one per round; the first round of all is not counted."""
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        pythons = dict.fromkeys(("torch", "dcp", "copy", "trivet"), sys.executable)
        if options.lightning:
            pythons["lightning"] = options.lightning
        contenders = {n: Contender(n, python, Path(place) / n, options.megabytes) for n, python in pythons.items()}
        try:
            for number in range(options.rounds + 1):
                # another one begins each round: who comes behind a save pays for its pages
                begin = number * 5 % len(ROUND)
                for name, what in ROUND[begin:] + ROUND[:begin]:
                    if name in contenders:
                        answer = contenders[name].ask(what)
                        if number:
                            found.setdefault(f"{name} {what}", []).append(answer)
                print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
        finally:
            for contender in contenders.values():
                contender.close()
    return found


def report(found: dict[str, list[dict[str, float]]], options: argparse.Namespace, load: str) -> str:
    def ratio(row: str, base: str, field: str = "s") -> str:
        if base not in found:
            return ""
        return f"{median(a[field] / b['s'] for a, b in zip(found[row], found[base], strict=True)):.2f}"

    lines = [
        f"| {options.megabytes} MB of weights, with Adam | s | / torch.save | / DCP | peak MB | until complete, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    titles = {"save": "save", "unsummed": "save", "async": "save behind the training: stands still", "load": "load"}
    titles["reload"] = "load where the optimizer has a state"
    for what, names in ROWS.items():
        for name, title in names.items():
            row = f"{name} {what}"
            if row not in found:
                continue
            base = what if "load" in what else "save"
            of_torch, of_dcp = ratio(row, f"torch {base}"), ratio(row, f"dcp {base}")
            total = [one["total s"] for one in found[row] if "total s" in one]
            cells = [
                f"{titles[what]}: {title}", f"{median(one['s'] for one in found[row]):.3f}", of_torch, of_dcp,
                f"{median(one['peak MB'] for one in found[row]):.0f}", f"{median(total):.3f}" if total else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    when = (
        f"Measured on {datetime.date.today()} with torch {torch.__version__}, Python {platform.python_version()}, one "
        f"thread, {options.rounds} rounds. {load}"
    )
    if not options.lightning:
        when += " Lightning was left out: no interpreter that has it was named."
    return "\n".join(lines) + "\n\n" + when


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=133, help="of the weights; the state is three times as large")
    parser.add_argument("--place", type=Path, help="directory to write in")
    parser.add_argument("--lightning", default=os.environ.get("TRIVET_LIGHTNING_PYTHON"), metavar="PYTHON")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table between the markers of this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    options = parser.parse_args()
    before = os.getloadavg()[0]
    found = measure(options)
    load = f"Load average {before:.1f} before and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores."
    text = report(found, options, load)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.write:
        pages.put(options.write, text, START, END)


if __name__ == "__main__":
    main()
