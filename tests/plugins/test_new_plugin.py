"""What `trivet plugins new` writes, installed as it is: listed, loaded, trained with, and conforming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import conforms, sessions


@pytest.mark.slow
@pytest.mark.parametrize("kinds", sessions("strategy", "accelerator", "precision"), ids=" and ".join)
def test_a_new_plugin_passes_its_own_suite(kinds: tuple[str, ...], installed: Any, tmp_path: Path) -> None:
    target = tmp_path / "site"
    for kind in kinds:
        code, _, err = installed.run("trivet", "plugins", "new", kind, f"my-{kind}", "--into", str(tmp_path))
        assert code == 0, err
    installed.pip(*(tmp_path / f"my-{kind}" for kind in kinds), into=target)
    for kind in kinds:
        code, out, err = installed.run("trivet", "plugins", kind, "--check", "--json", path=target)
        assert code == 0, err
        (row,) = (row for row in json.loads(out) if row["name"] == f"my-{kind}")
        assert (row["distribution"], row["version"], row["check"]["status"]) == (f"trivet-my-{kind}", "0.1.0", "ok")
    conforms(installed, [tmp_path / f"my-{kind}" / f"test_trivet_my_{kind}.py" for kind in kinds], path=target)
