"""The packages that the pages of `docs/plugins` hold: every block of code with a caption is a file of that name."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "plugins"
BLOCK = re.compile(r"^```\{code-block\} \w+\n:caption: (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write(page: str, into: Path) -> list[Path]:
    """Write the files of one page; returns the folders of its packages, in the order of the page."""
    folders = []
    for name, text in BLOCK.findall((PAGES / page).read_text()):
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.name == "pyproject.toml":
            folders.append(path.parent)
    return folders
