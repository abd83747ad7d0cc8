"""Sphinx configuration. Build: python -m sphinx --fail-on-warning docs docs/_build (docs/decisions/0002)."""

from __future__ import annotations

import tomllib
from pathlib import Path

_meta = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "Trivet"
copyright = "the Trivet contributors"
version = release = _meta["version"]

extensions = ["myst_parser"]
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = f"Trivet {version}"
html_show_sphinx = False
nitpicky = True  # a link to nothing is a warning, and warnings are errors

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
