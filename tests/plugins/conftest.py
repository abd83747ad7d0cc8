"""A virtual environment with the packages of the pages, installed by pip."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
import pytest
from full import FULL

FOLDERS = ("allreduce", "localsgd", "ledger", "stochastic")  # of plugins that the suites know
RAN: list[tuple[Any, ...]] = []  # name, checks in cells that ran, and those left out


@dataclass
class Installed:
    """Where the packages' sources are, and the python that has them installed."""

    root: Path
    python: Path

    def pip(self, *sources: Path, into: Path | None = None) -> None:
        """Build and install from sources, without network."""
        target = ["--target", str(into)] if into else []
        flags = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation", *target]
        ran = subprocess.run(
            [self.python, "-m", "pip", "install", *flags, *sources], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr

    def run(self, *arguments: str | Path, cwd: Path | None = None, path: Path | None = None) -> tuple[int, str, str]:
        """``python -m`` with these arguments: the exit code, stdout, stderr."""
        environ = os.environ | {"COLUMNS": "100"} | ({"PYTHONPATH": str(path)} if path else {})
        ran = subprocess.run(
            [self.python, "-m", *map(str, arguments)],
            cwd=cwd or self.root, env=environ, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        return ran.returncode, ran.stdout, ran.stderr


def sessions(*names: str) -> list[tuple[str, ...]]:
    """Whose suites run in one session, on the same worker processes; with ``TRIVET_CI_FULL=1`` each needs its own."""
    return [(name,) for name in names] if FULL else [names]


def conforms(installed: Installed, tests: Sequence[Path], path: Path | None = None) -> None:
    """Run packages' own suites, all cells with ``TRIVET_CI_FULL=1``, else few; each of them trains."""
    cells = "all" if FULL else "few"
    root = os.path.commonpath([test.parent for test in tests])
    options = ("-v", "-p", "no:cacheprovider", f"--trivet-cells={cells}", f"--rootdir={root}")
    code, out, err = installed.run("pytest", *options, *tests, cwd=tests[0].parent, path=path)
    print(out)  # the table, where somebody looks
    assert code == 0, out + err
    for test in tests:
        assert re.search(rf"{test.name}::\w+::test_trains_like_the_reference.* PASSED", out), (
            f"{test.name}: no cell ran"
        )
    counts = re.search(r"^([1-9]\d*) checks in cells ran, (\d+) were left out", out, re.MULTILINE)
    assert counts, "no cell ran"
    RAN.append((", ".join(test.parent.name for test in tests), *map(int, counts.groups())))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the suites left out."""
    for name, ran, left_out in RAN:
        terminalreporter.write_line(f"suites of {name}: {ran} checks in cells ran, {left_out} were left out.")
    if any(left_out for _, _, left_out in RAN):
        terminalreporter.write_line("TRIVET_CI_FULL=1 runs all of them.")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("plugins")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)  # pip is the outer one
    python = root / "venv" / "bin" / "python"
    # torch and Trivet are those of the environment that runs the tests; what is installed here is found first
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    purelib = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (purelib / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    found = Installed(root, python)
    for page in ("strategy.md", "accelerator.md", "precision.md", "others.md"):
        pages.write(page, root)
    found.pip(*(root / folder for folder in (*FOLDERS, "extras")))
    return found


@pytest.fixture
def trivet(installed: Installed) -> Callable[..., tuple[int, str, str]]:
    """The command, in the environment that has the packages."""
    return lambda *arguments, **options: installed.run("trivet", *arguments, **options)
