"""How many cells a run takes, and the page that is kept of a full one. The table itself is the pytest plugin's."""

from __future__ import annotations

import os
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from full import FULL
from trivet.testing.pool import Pools
from trivet.testing.pytest_plugin import REPORT
from trivet.testing.report import write_between_marks

STARTED: list[str] = []  # the commit at which the session began


def pytest_configure(config: pytest.Config) -> None:
    if config.option.trivet_cells is None:
        config.option.trivet_cells = "all" if FULL else "cover"


@pytest.fixture(scope="session")
def pools(trivet_pools: Pools) -> Pools:
    """The suites' worker processes, by world size."""
    return trivet_pools


def pytest_collection_finish(session: pytest.Session) -> None:
    STARTED[:] = [git("describe", "--always", "--dirty", "--exclude=*")]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    ran, left_out = report.counts
    if not ran:
        return
    if left_out:
        terminalreporter.write_line("TRIVET_CI_FULL=1 runs all checks in all cells of tests/conformance.")
    page, _, marks = os.environ.get("TRIVET_CONFORMANCE_TABLE", "").partition("#")
    chosen = config.option.keyword or config.option.markexpr  # what -k or -m left out is not counted
    if page and not left_out and not chosen and exitstatus == 0:
        commit = " to ".join(dict.fromkeys((*STARTED, git("describe", "--always", "--dirty", "--exclude=*"))))
        intro = f"Commit {commit}, {date.today().isoformat()}: {ran} checks in cells."
        write_between_marks(Path(page), [intro, "", *report.table()], marks or "measured")


def git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "unknown"
