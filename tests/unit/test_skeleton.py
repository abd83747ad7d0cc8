"""`trivet plugins new`: what it refuses, before anything is written. tests/plugins tries what it writes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from distributions import Install
from trivet.__main__ import main

ROOT = Path(__file__).parents[2]
KINDS = ("strategy", "accelerator", "precision")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["strategy", "ddp"], "the name 'ddp' is taken by strategy 'ddp' (trivet "),
        (["precision", "bf16"], "the name 'bf16' is taken by precision 'bf16-mixed' (trivet "),
        (["accelerator", "tied"], "the name 'tied' is taken: accelerator 'tied' is registered by 2 distributions"),
        (["strategy", "auto"], "'auto' cannot be a plugin's name"),
        (["strategy", "Ring"], "'Ring' cannot be a plugin's name: expected small letters and digits"),
        (["strategy", "../ring"], "'../ring' cannot be a plugin's name"),
        (["strategy", "ring-"], "'ring-' cannot be a plugin's name"),
        (["strategy", "acme"], "trivet-acme 1.2 is installed already"),
        (["strategy", "moduled"], "there is a module 'trivet_moduled' already"),
        (["strategy", "there"], "'there' exists already. Choose another name, or a directory by --into"),
        (["strategy", "ring", "--into", "nowhere"], "--into 'nowhere': there is no such directory"),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_anything_is_written(
    argv: list[str],
    message: str,
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("acme_one", "acme_two"):
        install(name, f"tied = {name}:Good", kind="accelerator")
    install("trivet_acme", "other = trivet_acme:Good", kind="precision")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trivet_moduled.py").touch()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["plugins", "new", *argv]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_wrote_and_what_to_do_next(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "new", kind, "my-own_one", "--into", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    written = {path.name for path in (tmp_path / "my-own_one").iterdir()}
    assert written == {"README.md", "pyproject.toml", "trivet_my_own_one.py", "test_trivet_my_own_one.py"}
    assert all(name in out for name in written)
    assert "pip install -e" in out
    assert "class MyOwnOne(" in (tmp_path / "my-own_one" / "trivet_my_own_one.py").read_text()


@pytest.mark.parametrize(
    ("name", "cls"), [("none", "NonePrecision"), ("policy", "PolicyPrecision"), ("narrow", "Narrow")]
)
def test_a_class_has_no_name_that_the_module_needs_otherwise(name: str, cls: str, tmp_path: Path) -> None:
    assert main(["plugins", "new", "precision", name, "--into", str(tmp_path)]) == 0
    folder = tmp_path / name
    text = (folder / f"trivet_{name}.py").read_text()
    assert f"class {cls}(Precision)" in text
    compile(text, name, "exec")
    assert f'"trivet_{name}:{cls}"' in (folder / "pyproject.toml").read_text()


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="the extra lint is not installed")
def test_what_is_written_is_clean(tmp_path: Path) -> None:
    for kind in KINDS:
        main(["plugins", "new", kind, f"my-{kind}", "--into", str(tmp_path)])
    for command in (["check"], ["format", "--check"]):
        arguments = [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        ran = subprocess.run([*arguments, str(tmp_path)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
