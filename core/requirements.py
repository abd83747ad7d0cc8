"""What the metadata of an installed distribution says of what it needs: for messages about plugins that cannot load."""

from __future__ import annotations

import re
from importlib import metadata


def normalized(distribution: str) -> str:
    """The name of a distribution as names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def missing_package(error: BaseException, distribution: str, module: str = "") -> str:
    """What to install where ``error`` says that a module is missing, as far as the distribution's metadata tells.

    ``module`` is what the entry point names. Starts with a space; an empty string for any other error.
    """
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    if f"{module}.".startswith(f"{error.name}."):
        return f" The entry point names a module that {distribution} should have brought; install {distribution} again."
    missing = normalized(error.name.partition(".")[0])
    requirements, offered = _requires(distribution)
    for name, extra, _ in requirements:
        if normalized(name) == missing and extra:
            return f" Install it with: pip install '{distribution}[{extra}]'"
        if normalized(name) == missing:
            return f" {distribution} requires {name!r}: pip install {name}"
    if offered:
        return f" {distribution} has the extras {', '.join(offered)}; one of them may bring {error.name!r}."
    return f" Install the package that has the module {error.name!r}; {distribution} does not say which one that is."


def trivet_wanted(distribution: str) -> str:
    """The versions of Trivet that a distribution asks for, as ``trivet>=0.3``, or an empty string."""
    for name, _, text in _requires(distribution)[0]:
        if normalized(name) == "trivet":
            return text.partition(";")[0].replace("(", "").replace(")", "").replace(" ", "")
    return ""


def extras(distribution: str) -> list[str]:
    """The names of a distribution's extras."""
    return _requires(distribution)[1]


def _requires(distribution: str) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Name, extra and text of each requirement, and the names of all extras."""
    try:
        described = metadata.distribution(distribution)
        offered = described.metadata.get_all("Provides-Extra") or []
        texts = described.requires or []
    except metadata.PackageNotFoundError:
        return [], []
    found = []
    for text in texts:
        name = re.match(r"[\w.-]+", text)
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", text)
        if name is not None:
            found.append((name[0], extra[1] if extra else "", text))
    return found, offered
