"""What importing Trivet does, and what it must not do. Each case runs in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEAVY = ("torch", "numpy", "jsonargparse", "rich", "trivet.strategies", "trivet.accelerators", "trivet.precision")

SHOW_MODULES = f"""
import sys
print("imported:", *sorted(name for name in sys.modules if name.startswith({HEAVY!r})))
"""


def python(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, text=True, capture_output=True)


def imported(code: str, *arguments: str) -> list[str]:
    """The modules from `HEAVY` that are loaded after ``code`` has run."""
    result = python(code + SHOW_MODULES, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.rpartition("imported:")[2].split()


def test_import_trivet_imports_neither_torch_nor_a_plugin() -> None:
    assert imported("import trivet; dir(trivet); trivet.__version__; trivet.__all__") == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plugins"]], ids=" ".join)
def test_the_command_line_answers_without_torch(arguments: list[str]) -> None:
    code = """
import sys
from trivet.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as exit:
    status = exit.code
assert status in (0, None), status
"""
    found = imported(code, *arguments)
    assert [name for name in found if not name.startswith(("rich", "jsonargparse"))] == []


@pytest.mark.parametrize(
    "module",
    [
        *("core", "core.plugins", "core.errors", "core.launch.world", "strategies", "strategies.ddp"),
        *("accelerators", "accelerators.cpu", "precision", "precision.full"),
    ],
)
def test_a_folder_of_the_checkout_is_not_imported_a_second_time(module: str) -> None:
    """From the root of a checkout, `import core` would find the folder and give second copies of every class."""
    result = python(f"import sys, trivet\ntry: import {module}\nfinally: print({module!r} in sys.modules)")
    assert result.returncode == 1
    assert result.stdout.strip() == "False"
    assert "ImportError: this folder is the package 'trivet" in result.stderr
    assert "Install" in result.stderr


def test_python_m_core_is_refused() -> None:
    result = subprocess.run([sys.executable, "-m", "core", "--help"], cwd=ROOT, text=True, capture_output=True)
    assert result.returncode != 0
    assert "this folder is the package 'trivet'" in result.stderr
