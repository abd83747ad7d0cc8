"""``trivet plugins``: what is installed, from metadata alone, and with ``--check`` what works."""

from __future__ import annotations

import argparse
import inspect
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ..combination import KNOWN, nearest
from ..errors import TrivetError
from ..plugin_checks import base_class, sets_interface
from ..registry import GROUPS, Entry, entries, load, make
from .text import aligned, fill
from .words import Words


def show_plugins(argv: Sequence[str], *, prog: str) -> int:
    """Print the table or JSON, or write a new plugin; the exit code is 1 where ``--check`` found one that is broken."""
    if argv[:1] == ["new"]:
        from .skeleton import new_plugin

        return new_plugin(argv[1:], prog=f"{prog} new")
    parser = Words(
        prog=prog,
        description="List the installed plugins. Reads metadata only; with --check each is imported.",
        epilog=f"`{prog} new KIND NAME` writes a package with a plugin of your own.",
    )
    parser.add_argument(
        "kind", nargs="?", choices=list(GROUPS), metavar="KIND", help=f"show only one of: {', '.join(GROUPS)}"
    )
    parser.add_argument("--check", action="store_true", help="import each; print needs, offers and what is unavailable")
    parser.add_argument(
        "--matrix", action="store_true", help="import all; show which strategy, accelerator and precision go together"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="with --matrix: print a page of documentation")
    parser.add_argument(
        "--portable", action="store_true", help="with --matrix: Trivet's own plugins, as if every device were there"
    )
    options = parser.parse_args(list(argv))
    if options.matrix:
        if options.kind or options.check:
            parser.error("--matrix shows all kinds; give neither a kind nor --check with it")
        return _show_matrix(options)
    if options.markdown or options.portable:
        parser.error("--markdown and --portable belong to --matrix")
    found = [entry for kind in GROUPS if options.kind in (None, kind) for entry in entries(kind)]
    count = Counter((entry.kind, entry.name) for entry in found)
    rows = [
        asdict(entry)
        | {"group": GROUPS[entry.kind], "qualified": entry.qualified, "conflict": count[entry.kind, entry.name] > 1}
        for entry in found
    ]
    if options.check:
        for row, entry in zip(rows, found, strict=True):
            row["check"] = check(entry)
    print(json.dumps(rows, indent=2) if options.json else _table(rows))
    return 1 if any(row.get("check", {}).get("status") == "broken" for row in rows) else 0


def _show_matrix(options: argparse.Namespace) -> int:
    from . import matrix

    found = matrix.matrix(portable=options.portable)
    if options.json:
        print(json.dumps(found.as_data(), indent=2))
    else:
        print(matrix.as_markdown(found) if options.markdown else matrix.as_text(found))
    return 0


def check(entry: Entry) -> dict[str, Any]:
    """Import one plugin. ``status``: ok, unavailable (on this machine), broken, or untried (needs arguments)."""
    try:
        factory = load(entry.kind, entry.qualified)
        takes = {"options": _options(factory)}
        if entry.kind == "callback" and isinstance(factory, type):
            from ..hooks import check_names  # a Trainer refuses misnamed hooks, too

            check_names(object.__new__(factory), base_class("callback"))
    except Exception as error:  # whatever a foreign module raises while it is imported is the answer
        return {"status": "broken", "reason": _reason(error)}
    return (_asked(entry) if entry.kind == "environment" else _made(entry)) | takes


def _options(factory: Any) -> list[str]:
    """The arguments of a constructor, with their defaults."""
    parameters = inspect.signature(factory).parameters.values()
    return [str(parameter.replace(annotation=parameter.empty)) for parameter in parameters]


def _made(entry: Entry) -> dict[str, Any]:
    if entry.kind not in ("strategy", "accelerator", "precision"):
        return {"status": "ok"}
    try:
        plugin = make(entry.kind, entry.qualified).plugin
        answer: dict[str, Any] = {
            "status": "ok",
            "needs": {kind: sorted(names) for kind, names in vars(plugin.needs).items() if names},
            "offers": sorted(plugin.offers),
        }
        wanted = {(kind, name) for kind, names in vars(plugin.needs).items() for name in names}
        doubts = [
            f"{kind} capability {name!r} is none of Trivet's; did the author mean {near!r}?"
            for kind, name in sorted(wanted | {(entry.kind, name) for name in plugin.offers})
            if name not in KNOWN[kind] and (near := nearest(name, KNOWN[kind]))
        ]
        if entry.distribution != "trivet" and not sets_interface(type(plugin), entry.kind):
            doubts.append("its class does not set interface, and so claims to speak whatever Trivet is installed")
        if doubts:
            answer["doubts"] = doubts
        if entry.kind == "accelerator":
            if plugin.is_available():
                answer["devices"] = plugin.device_count()
            else:
                answer |= {"status": "unavailable", "reason": plugin.unavailable_reason()}
    except Exception as error:  # likewise
        return {"status": "untried", "reason": _reason(error)}
    return answer


def _asked(entry: Entry) -> dict[str, Any]:
    """Whether this process was started by an environment, and why it says so."""
    try:
        environment = make(entry.kind, entry.qualified).plugin
        world, reasons = environment.detect(os.environ), ", ".join(environment.reasons(os.environ))
    except Exception as error:
        return {"status": "untried", "reason": _reason(error)}
    return {"status": "ok", "reason": f"started this process: {reasons}" if world else f"not this process: {reasons}"}


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, TrivetError) else f"{type(error).__name__}: {error}"


def _table(rows: list[dict[str, Any]]) -> str:
    """A block for each group; the columns of all blocks are aligned."""
    if not rows:
        return "no plugins are installed"
    cells = [(row["name"], f"{row['distribution']} {row['version']}", row["target"]) for row in rows]
    printed = iter(aligned(cells, indent="  "))
    lines: list[str] = []
    for group, members in groupby(rows, key=lambda row: row["group"]):
        lines += ["", group] if lines else [group]
        for row in members:
            lines += next(printed)
            if row["conflict"]:
                lines += fill("    ", f"conflict: another distribution has the name, write {row['qualified']}")
            lines += _checked(row.get("check"))
    return "\n".join(lines)


def _checked(answer: dict[str, Any] | None) -> list[str]:
    if answer is None:
        return []
    lines = fill(f"    {answer['status']:<12}", answer.get("reason", ""))
    for kind, names in answer.get("needs", {}).items():
        lines += fill("    needs       ", f"of the {kind}: {', '.join(names)}")
    if answer.get("offers"):
        lines += fill("    offers      ", ", ".join(answer["offers"]))
    if answer.get("options"):
        lines += fill("    options     ", ", ".join(answer["options"]))
    for doubt in answer.get("doubts", []):
        lines += fill("    doubtful    ", doubt)
    if "devices" in answer:
        lines.append(f"    devices     {answer['devices']}")
    return lines
