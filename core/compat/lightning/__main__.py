"""``python -m trivet.compat.lightning script.py args...``: run a script that imports Lightning, with Trivet."""

from __future__ import annotations

import os
import runpy
import sys

from . import facade


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m trivet.compat.lightning script.py [argument ...]")
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    facade.alias()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
