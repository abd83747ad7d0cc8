"""The pool for the session, and the table of cells at its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from trivet.testing import cells
from trivet.testing.pool import Pools

from . import record

RESULTS: dict[cells.Item, str] = {}
STARTED: list[str] = []  # the commit at which the session began


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker processes by world size; those of a size start with its first task."""
    STARTED[:] = [git("describe", "--always", "--dirty", "--exclude=*")]
    found = Pools()
    yield found
    found.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    params = getattr(getattr(item, "callspec", None), "params", {})
    if report.when == "call" and "conformance_item" in params:
        RESULTS[params["conformance_item"]] = "ok" if report.passed else "FAILED"
    return report


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    if not RESULTS:
        return
    terminalreporter.section("conformance")
    lines = cells.table(RESULTS, record.expected())
    terminalreporter.write_line("\n".join(lines))
    everything = cells.items(record.admitted(cells.all_cells()))
    left_out = len(everything) - len(RESULTS)
    hint = "" if left_out == 0 else " (TRIVET_CI_FULL=1 runs all)"
    terminalreporter.write_line(f"{len(RESULTS)} checks in cells ran, {left_out} were left out{hint}.")
    target = os.environ.get("TRIVET_CONFORMANCE_TABLE")
    if target and left_out == 0 and exitstatus == 0:
        Path(target).write_text(report(lines))


def git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "unknown"


def report(lines: list[str]) -> str:
    """The page that is kept of the last full run."""
    commit = " to ".join(dict.fromkeys((*STARTED, git("describe", "--always", "--dirty", "--exclude=*"))))
    return (
        "# Conformance: the last full run\n\n"
        f"Commit {commit}, {date.today().isoformat()}. Every check of every cell, on the CPU with gloo; W "
        "is the number of processes. Written by `TRIVET_CI_FULL=1 TRIVET_CONFORMANCE_TABLE=tests/conformance/table.md "
        "pytest tests/conformance`, if all passed.\n\n" + "\n".join(lines) + "\n"
    )
