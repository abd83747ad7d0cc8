"""The rules of the architecture (docs/architecture.md), read off the syntax trees of the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import trivet

ROOT = Path(__file__).parents[2]
PLUGIN_FOLDERS = ("strategies", "accelerators", "precision")
PLUGIN_BASES = {"Strategy", "Accelerator", "Precision"}

EXPORTED = {
    "Accelerator",
    "Callback",
    "Checkpoint",
    "CombinedLoader",
    "DataModule",
    "Environment",
    "Launcher",
    "Logger",
    "Module",
    "Plan",
    "Precision",
    "Runtime",
    "Strategy",
    "Trainer",
    "World",
    "__version__",
    "cli",
    "negotiate",
    "rank_zero",
    "seed_everything",
}

# Underscore names that their owners document as public.
DOCUMENTED = {
    "os._exit",
    "sys._current_frames",
    "sys._getframe",
    *("_fields", "_replace", "_asdict", "_make", "_field_defaults"),  # of named tuples
    "torch._foreach_mul_",  # docs.pytorch.org, "Foreach Functions"
}

# Reads of another object's private attribute outside core/torch_compat.py: (file, name) and why there is no public way.
# An entry that is no longer needed fails the test.
PRIVATE_READS: dict[tuple[str, str], str] = {}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def package_of(path: Path) -> str:
    """The dotted name of the package that a file lies in, `core/data/train.py` -> `trivet.data`."""
    top, *rest = path.relative_to(ROOT).parts[:-1]
    return ".".join(["trivet", *([] if top == "core" else [top]), *rest])


def imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every module that the file imports anywhere, as an absolute dotted name; `from a import b` gives `a.b`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package_of(path).split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
            for alias in node.names:
                yield node, f"{base}.{alias.name}"


def plugin_classes() -> set[str]:
    """The names of all classes in the plugin folders."""
    return {
        node.name
        for path in sources(*PLUGIN_FOLDERS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    }


def names_in(node: ast.AST) -> set[str]:
    """The last parts of all names in an expression: `a.B` and `B` both give `B`."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]


def last_part(node: ast.expr) -> str:
    """`a.B`, `B` and `"B"` give `B`; other expressions an empty string."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_type_of_something(node: ast.expr) -> bool:
    """`type(x)`, `x.__class__`, and the `__name__` of either."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return isinstance(node, ast.Attribute) and node.attr in ("__class__", "__name__", "__qualname__")


def type_tests(path: Path) -> Iterator[tuple[ast.AST, set[str]]]:
    """Every place that tests the type of something, with the class names that it is compared with.

    `isinstance`, `issubclass`, `match` on a class, comparisons with `type(x)`, `x.__class__` or their `__name__`.
    """
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            if node.func.id in ("isinstance", "issubclass"):
                yield node, names_in(node.args[1])
        elif isinstance(node, ast.MatchClass):
            yield node, names_in(node.cls)
        elif isinstance(node, ast.Compare):
            sides = [part for side in (node.left, *node.comparators) for part in elements(side)]
            if any(is_type_of_something(side) for side in sides):
                yield node, {last_part(side) for side in sides}


def private_reads(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every `x._name` and `getattr(x, "_name")` (also set, has and del) where x is not self, cls or super()."""
    for node in ast.walk(tree(path)):
        name, owner = "", None
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            and len(node.args) >= 2
            and isinstance(node.args[1], ast.Constant)
        ):
            name, owner = str(node.args[1].value), node.args[0]
        if owner is None or not name.startswith("_") or (name.startswith("__") and name.endswith("__")):
            continue
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            continue
        if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
            continue
        if name not in DOCUMENTED and f"{ast.unparse(owner)}.{name}" not in DOCUMENTED:
            yield node, name


def test_the_core_never_imports_a_plugin_folder() -> None:
    forbidden = tuple(f"trivet.{folder}" for folder in PLUGIN_FOLDERS)
    found = [
        f"{at(path, node)} imports {name}"
        for path in sources("core")
        for node, name in imports(path)
        if name.startswith(forbidden)
    ]
    # Nor by name: a string such as "trivet.strategies.ddp" in the core could only serve to import it.
    found += [
        f"{at(path, node)} names {node.value!r}"
        for path in sources("core")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(tuple(f"{name}{mark}" for name in forbidden for mark in ".:"))
    ]
    assert not found


def test_plugins_of_one_kind_do_not_import_another_kind() -> None:
    found = []
    for folder in PLUGIN_FOLDERS:
        others = tuple(f"trivet.{other}" for other in PLUGIN_FOLDERS if other != folder)
        for path in sources(folder):
            found += [f"{at(path, node)} imports {name}" for node, name in imports(path) if name.startswith(others)]
    assert not found


def test_nobody_tests_the_type_of_a_concrete_plugin() -> None:
    concrete = plugin_classes()
    assert {"Single", "DDP"} <= concrete
    found = [
        f"{at(path, node)} tests for {sorted(names & concrete)}"
        for path in sources("core", *PLUGIN_FOLDERS)
        for node, names in type_tests(path)
        if names & concrete
    ]
    # Nor by the device type, where torch itself does not tell devices apart (it has CUDA's own streams, pinned memory).
    found += [
        f"{at(path, node)} compares with {constant.value!r}"
        for path in sources("core")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare)
        for constant in ast.walk(node)
        if isinstance(constant, ast.Constant) and constant.value in ("xla", "mps", "xpu")
    ]
    assert not found, "only capabilities.negotiate may judge a combination, and it judges by capability names"


def test_only_the_registry_tests_for_a_kind_of_plugin() -> None:
    found = [
        f"{at(path, node)} tests for {sorted(names & PLUGIN_BASES)}"
        for path in sources("core", *PLUGIN_FOLDERS)
        for node, names in type_tests(path)
        if names & PLUGIN_BASES and path.relative_to(ROOT).as_posix() not in ("core/plugins.py", "core/registry.py")
    ]
    assert not found


def test_private_attributes_of_others_are_read_in_torch_compat_only() -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for path in sources("core", *PLUGIN_FOLDERS):
        file = path.relative_to(ROOT).as_posix()
        if file != "core/torch_compat.py":
            for node, name in private_reads(path):
                found.setdefault((file, name), []).append(at(path, node))
    assert not {f"{where[0]} reads {key[1]}" for key, where in found.items() if key not in PRIVATE_READS}
    assert not PRIVATE_READS.keys() - found.keys(), "these entries of PRIVATE_READS are not needed any more"


def test_the_exported_names_are_these() -> None:
    assert set(trivet.__all__) == set(dir(trivet)) == EXPORTED


def test_every_exported_name_can_be_had() -> None:
    missing = [name for name in trivet.__all__ if getattr(trivet, name, None) is None]
    assert not missing


def test_no_exported_name_is_the_name_of_a_submodule() -> None:
    """`import trivet.cli` would otherwise replace the function `trivet.cli` by a module."""
    submodules = {path.stem for path in (ROOT / "core").iterdir()} | set(PLUGIN_FOLDERS)
    assert not submodules & set(trivet.__all__)


@pytest.mark.parametrize("name", ["utils", "helpers", "base", "common", "misc", "manager", "handler", "connector"])
def test_no_file_has_a_name_that_says_nothing(name: str) -> None:
    assert [path for path in sources("core", *PLUGIN_FOLDERS) if path.stem.strip("_") == name] == []


LONGEST = {"core/plugins.py": 540}  # the whole interface of a plugin in one file, most of it docstrings


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources("core", *PLUGIN_FOLDERS)
    }
    assert not {name: n for name, n in lengths.items() if n >= LONGEST.get(name, 400)}


@pytest.mark.parametrize(
    ("code", "kept"),
    [
        ("x._a", ["_a"]),
        ("self._a, cls._a, super()._a, x.__class__, os._exit, row._asdict()", []),
        ("self._x._y", ["_y"]),
        ("getattr(module, '_hooks', None)", ["_hooks"]),
        ("x._a = 1", ["_a"]),
    ],
)
def test_what_counts_as_a_private_read(code: str, kept: list[str], tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    assert [name for _, name in private_reads(path)] == kept


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(s, DDP)",
        "issubclass(type(s), (Single, ddp.DDP))",
        "type(s) is DDP",
        "type(s).__name__ == 'DDP'",
        "s.__class__ in (DDP,)",
        "match s:\n    case DDP(): pass",
    ],
)
def test_what_counts_as_a_type_test(code: str, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    assert any("DDP" in names for _, names in type_tests(path))
