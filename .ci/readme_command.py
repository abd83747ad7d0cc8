#!/usr/bin/env python3
"""Print a command of README.md: the code block that follows the line `<!-- command: NAME -->`.

CI runs what the README says by means of this, so that the two cannot differ.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def main(name: str) -> int:
    blocks = re.findall(
        rf"<!-- command: {re.escape(name)} -->\n```(?:bash|sh)\n(.*?)```\n", README.read_text(), re.DOTALL
    )
    if len(blocks) != 1:
        print(f"README.md has {len(blocks)} code blocks marked `<!-- command: {name} -->`, expected 1", file=sys.stderr)
        return 1
    print(blocks[0], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
