"""The sdist, the wheel built from it and the editable install hold the package, whole and nothing else."""

from __future__ import annotations

import ast
import configparser
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
TOP = ["pyproject.toml", "README.md", "LICENSE"]
NO_CACHE = shutil.ignore_patterns("__pycache__")


def files_of_the_tree() -> set[str]:
    """Every file of the package folders under its name in the wheel."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, since setuptools leaves `build/` and `trivet.egg-info/` where it works."""
    path = tmp_path_factory.mktemp("source")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, path / folder, ignore=NO_CACHE)
    for name in TOP:
        shutil.copy(ROOT / name, path)
    return path


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from the sdist."""
    path = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", path, source, cwd=path)
    return path


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = files_of_the_tree()
    hint = "a new folder wants an entry in [tool.setuptools] packages, a new data file one in package-data"
    assert names == expected, f"missing: {sorted(expected - names)}, too many: {sorted(names - expected)} ({hint})"
    assert "trivet/py.typed" in names


def test_the_wheel_is_pure_and_carries_the_licence(wheel: Path) -> None:
    assert wheel.name == f"trivet-{PROJECT['project']['version']}-py3-none-any.whl"
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_the_sdist_holds_the_sources(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        file.relative_to(ROOT).as_posix()
        for folder in FOLDERS.values()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert expected | set(TOP) <= names


def test_every_entry_point_names_something_that_the_wheel_defines(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    groups = configparser.ConfigParser(delimiters=("=",))
    groups.optionxform = str  # type: ignore[assignment,method-assign]
    groups.read_string(archive.read(metadata).decode())
    declared = {"console_scripts": PROJECT["project"]["scripts"], **PROJECT["project"]["entry-points"]}
    assert {group: dict(groups[group]) for group in groups.sections()} == declared

    undefined = []
    for group in groups.sections():
        for name, target in groups[group].items():
            module, _, attribute = target.partition(":")
            file = f"{module.replace('.', '/')}.py"
            tree = ast.parse(archive.read(file)) if file in archive.namelist() else ast.Module([], [])
            if not attribute and file in archive.namelist():
                continue  # the module itself, as pytest wants it
            if attribute not in {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}:
                undefined.append(f"{group}: {name} = {target}")
    assert not undefined


IMPORTS = """
import importlib.metadata, site, sys
site.addsitedir(sys.argv[1])
import trivet, trivet.strategies, trivet.accelerators, trivet.precision, trivet.errors
print(trivet.__file__, trivet.strategies.__file__, sep="\\n")
(found,) = importlib.metadata.distributions(name="trivet", path=[sys.argv[1]])
print(sorted(point.name for point in found.entry_points if point.group == "trivet.strategies"))
"""


@pytest.mark.parametrize("editable", [False, True], ids=["regular", "editable"])
def test_the_installed_package_imports(editable: bool, source: Path, wheel: Path, tmp_path: Path) -> None:
    """`-I -S` hides the Trivet that runs this test: only the installation under test can be found."""
    where = ["--editable", source] if editable else [wheel]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run(*pip, "--ignore-installed", "--no-warn-script-location", "--prefix", tmp_path, *where, cwd=tmp_path)
    (site,) = {path.parent for path in tmp_path.rglob("trivet-*.dist-info")}
    lines = run(sys.executable, "-I", "-S", "-c", IMPORTS, site, cwd=tmp_path).splitlines()
    home = {"trivet": source / "core", "trivet.strategies": source / "strategies"}
    if not editable:
        home = {"trivet": site / "trivet", "trivet.strategies": site / "trivet" / "strategies"}
    assert [Path(line).parent for line in lines[:2]] == list(home.values())
    assert lines[2] == str(sorted(PROJECT["project"]["entry-points"]["trivet.strategies"]))
    assert (tmp_path / "bin" / "trivet").exists() or (tmp_path / "local" / "bin" / "trivet").exists()
