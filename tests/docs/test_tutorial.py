"""The code on pages that users read runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def runnable(page: str) -> str:
    """The code blocks that follow `<!-- run -->`, as one script."""
    blocks = re.findall(r"^<!-- run -->\n```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} has no code block after a line `<!-- run -->`"
    return "\n\n".join(blocks)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(runnable(page))
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:__main__", script], cwd=tmp_path, text=True, capture_output=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_code_that_is_not_run_is_at_least_python(page: str) -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE):
        compile(block, page, "exec")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_between_files_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []
