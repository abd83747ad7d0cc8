"""The tables of `speed.py` as Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Rows = dict[str, dict[str, float]]
DISTRIBUTIONS = {
    "ignite": "pytorch-ignite",
    "lightning_fabric": "pytorch-lightning",
    "pytorch_lightning": "pytorch-lightning",
}


def table(rows: Rows, key: str) -> str:
    """``key``: which of a row's figures counts; of fits the seconds, of steps microseconds."""
    unit = "s" if key == "seconds" else "µs"
    what = {"seconds": "whole fit", "median": "step (median)", "cpu": "step (own time)"}[key]
    lines = [
        f"| | {what}, {unit} | over the plain loop, {unit} | ratio |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        shown = f"**{name}**" if name == "trivet" else name
        lines.append(f"| {shown} | {number(row[key])} | {number(row[f'{key} over'])} | {row[f'{key} ratio']:.3f} |")
    return "\n".join(lines)


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def about(script: str, packages: Iterable[str], rounds: int, loads: Sequence[float]) -> str:
    """With what and where it was measured."""
    names = dict.fromkeys(DISTRIBUTIONS.get(package, package) for package in packages)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    machine = f"{processor()}, {os.cpu_count()} cores, one thread"
    load = f"{min(loads):.1f}" if len(loads) == 1 else f"{min(loads):.1f} to {max(loads):.1f}"
    return (
        f"Measured on {datetime.date.today()} by `tests/benchmarks/{script}` with {versions}, Python "
        f"{platform.python_version()}, on {machine}; {rounds} rounds; load {load}."
    )


def page(tables: dict[str, Any], rounds: int, packages: list[str]) -> str:
    """Tables, with where and with what they were measured."""
    parts = [f'{about("speed.py", packages, rounds, [t["load"] for t in tables.values()])} "plain again" is the noise.']
    for title, one in tables.items():
        parts.append(f"**{title}**\n\n{table(one['rows'], one['key'])}")
    return "\n\n".join(parts)


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
