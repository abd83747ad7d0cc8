"""The command ``trivet``, which is also ``python -m trivet``."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    from .commands.entry import run

    return run(sys.argv[1:] if argv is None else argv, prog="trivet")[0]


if __name__ == "__main__":
    sys.exit(main())
