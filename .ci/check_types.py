#!/usr/bin/env python3
"""Type-check the package with `mypy --strict`, however Trivet is installed (docs/decisions/0001-packaging.md).

No folder of the checkout is called `trivet`, and mypy cannot follow a lax editable install. So this lays the folders
out in a temporary directory as pyproject.toml maps them, checks that, and prints messages with the paths of the
checkout. Further arguments go to mypy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    with tempfile.TemporaryDirectory() as temporary:
        for package, folder in sorted(folders.items()):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / folder, Path(temporary, *package.split(".")), ignore=ignore)
        result = subprocess.run(
            [
                *(sys.executable, "-m", "mypy", "--strict", "--no-color-output", "--package", "trivet"),
                *(f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"),
                *sys.argv[1:],
            ],
            cwd=temporary,
            env={**os.environ, "MYPYPATH": temporary},
            stdout=subprocess.PIPE,
            text=True,
        )
    output = result.stdout
    for package, folder in sorted(folders.items(), reverse=True):  # trivet.strategies before trivet
        output = re.sub(rf"^{package.replace('.', '/')}/", f"{folder}/", output, flags=re.MULTILINE)
    print(output, end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
