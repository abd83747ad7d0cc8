"""``trivet plugins new``: a package with one plugin that works, to be changed into one's own."""

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from string import Template

from ..errors import ConfigurationError, PluginConflict, PluginNotFound
from ..registry import GROUPS, find
from .templates import FILES, SUITES
from .words import Words

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def new_plugin(argv: Sequence[str], *, prog: str) -> int:
    """Write the package and say what to do with it. Raises ConfigurationError before anything is written."""
    parser = Words(
        prog=prog,
        description="Write a package with one plugin that works and passes its suite, to be changed into your own.",
    )
    parser.add_argument("kind", choices=list(SUITES), metavar="KIND", help=", ".join(SUITES))
    parser.add_argument("name", metavar="NAME", help="what to select it by, such as ring or my-strategy")
    parser.add_argument("--into", metavar="DIR", default=".", help="where its folder is made; here by default")
    options = parser.parse_args(list(argv))
    folder = write(options.kind, options.name, Path(options.into))
    print(f"{folder}:")
    for path in sorted(folder.iterdir()):
        print(f"  {path.name}")
    print(f"Next: pip install -e '{folder}[test]', then pytest in that folder.")
    return 0


def write(kind: str, name: str, into: Path) -> Path:
    """Write the package of a plugin to a new folder of its name; returns that."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} cannot be a plugin's name: expected small letters and digits, in words joined by '-' or '_', "
            "starting with a letter, such as 'ring' or 'my-strategy'."
        )
    distribution, module, folder = f"trivet-{name.replace('_', '-')}", f"trivet_{name.replace('-', '_')}", into / name
    _refuse_taken(kind, name, distribution, module)
    if not into.is_dir():
        raise ConfigurationError(f"--into {str(into)!r}: there is no such directory.")
    if folder.exists():
        raise ConfigurationError(f"{str(folder)!r} exists already. Choose another name, or a directory by --into.")
    from .. import __version__

    values = {
        "kind": kind,
        "article": "an" if kind[0] in "aeiou" else "a",
        "name": name,
        "distribution": distribution,
        "module": module,
        "cls": _class_name(kind, name),
        "group": GROUPS[kind],
        "suite": SUITES[kind],
        "version": __version__,
    }
    folder.mkdir()
    for path, text in FILES[kind].items():
        (folder / Template(path).substitute(values)).write_text(Template(text).substitute(values), encoding="utf-8")
    return folder


def _class_name(kind: str, name: str) -> str:
    """In capitals; with the kind behind it where Python or the module itself means something else by it."""
    found = "".join(word.capitalize() for word in re.split("[-_]", name))
    taken = keyword.iskeyword(found) or re.search(rf"\b{found}\b", FILES[kind]["$module.py"])
    return f"{found}{kind.capitalize()}" if taken else found


def _refuse_taken(kind: str, name: str, distribution: str, module: str) -> None:
    if name == "auto":
        raise ConfigurationError("'auto' cannot be a plugin's name: it lets Trivet choose.")
    try:
        raise ConfigurationError(f"the name {name!r} is taken by {find(kind, name)}. Choose another one.")
    except PluginConflict as error:
        raise ConfigurationError(f"the name {name!r} is taken: {error}") from error
    except PluginNotFound:
        pass
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        pass
    else:
        raise ConfigurationError(f"{distribution} {version} is installed already. Choose another name.")
    if importlib.util.find_spec(module) is not None:
        raise ConfigurationError(f"there is a module {module!r} already. Choose another name.")
