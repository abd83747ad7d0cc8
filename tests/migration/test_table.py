"""The table of docs/migration names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "migration").glob("*.md"))


def test_every_test_that_the_pages_name_exists() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in [path.stem, *re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)]
    }
    assert len(named) > 20
    assert not named - written


def test_every_difference_is_a_row() -> None:
    text = "".join(page.read_text() for page in PAGES)
    tests = re.findall(r"^def (test_\w+)\(", (ROOT / "tests/migration/test_differences.py").read_text(), re.MULTILINE)
    assert [name for name in tests if f"`{name}`" not in text] == []
