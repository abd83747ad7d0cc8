"""Every line of CUDA code that no test on a machine without a device executes, or only with a stand-in for torch.cuda.

    python tests/device/untested.py            print the lists
    python tests/device/untested.py --write    put them into docs/devices.md

Of ``accelerators/cuda.py`` each line is looked at while its tests run, under `sys.settrace`. Elsewhere the lines are
those that name CUDA, and what is within an ``if`` that does.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "accelerators" / "cuda.py"
TESTS = ROOT / "tests" / "unit" / "test_accelerators.py"
PAGE = ROOT / "docs" / "devices.md"
START, END = "<!-- untested: begin -->", "<!-- untested: end -->"
DEVICE = re.compile(r"torch\.cuda\.|\.cudnn\.|record_(?:stream|event)|wait_event|pin_memory\(|non_blocking")
NAMES = re.compile(r"\bcuda\b|\bCUDA\b|nccl", re.IGNORECASE)


def executable(code: CodeType) -> Iterator[int]:
    """The lines of a code object and of those in it."""
    yield from (line for _, _, line in code.co_lines() if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from executable(constant)


def documentation(tree: ast.AST) -> set[int]:
    """The lines of docstrings, and of strings that stand alone."""
    alone = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return {line for node in alone for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def executed() -> set[int]:
    """The lines of the accelerator that its tests execute."""
    lines: set[int] = set()

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        lines.add(frame.f_lineno)
        return within

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        return within(frame, event, argument) if frame.f_code.co_filename.endswith("accelerators/cuda.py") else None

    sys.settrace(look)
    try:
        code = pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS)])
    finally:
        sys.settrace(None)
    assert code == 0, "the accelerator's tests fail"
    return lines


def of_the_accelerator() -> tuple[list[str], list[str]]:
    """Lines that never run here, and lines that run with a stand-in."""
    text = CUDA.read_text()
    source, tree = text.splitlines(), ast.parse(text)
    known = set(executable(compile(text, str(CUDA), "exec"))) - documentation(tree)
    inside = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }
    ran = executed()
    never = [source[line - 1].strip() for line in sorted(known & inside - ran)]
    stand_ins = [source[line - 1].strip() for line in sorted(known & inside & ran) if DEVICE.search(source[line - 1])]
    return never, stand_ins


def elsewhere() -> list[str]:
    """``file: code`` of what is for CUDA in other files, in their order."""
    found = []
    for folder in ("core", "strategies", "precision"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            source, tree = text.splitlines(), ast.parse(text)
            lines: set[int] = set()
            for node in ast.walk(tree):
                if isinstance(node, ast.If) and NAMES.search(ast.unparse(node.test)):
                    lines |= {statement.lineno for statement in node.body}
                if isinstance(node, (ast.Attribute, ast.Name, ast.Call, ast.IfExp, ast.Compare)):
                    told = "torch.cuda" in ast.unparse(node) or (
                        isinstance(node, (ast.IfExp, ast.Compare)) and NAMES.search(ast.unparse(node))
                    )
                    lines |= {node.lineno} if told else set()
            name = path.relative_to(ROOT).as_posix()
            found += [f"{name}: {source[line - 1].strip()}" for line in sorted(lines - documentation(tree))]
    return list(dict.fromkeys(found))


def page() -> str:
    never, stand_ins = of_the_accelerator()
    parts = [
        (f"Of `accelerators/cuda.py`, never executed here: {len(never)} lines", never),
        (f"Of `accelerators/cuda.py`, executed with a stand-in for the device: {len(stand_ins)} lines", stand_ins),
        ("Elsewhere, for CUDA alone or with a part for it", elsewhere()),
    ]
    blocks = ["\n".join([f"{head}:", "", "```text", *(lines or ["none"]), "```"]) for head, lines in parts]
    return "\n\n".join(blocks)


def written() -> str:
    """What stands on the page."""
    return PAGE.read_text().partition(START)[2].partition(END)[0].strip()


if __name__ == "__main__":
    text = page()
    print(text)
    if sys.argv[1:] == ["--write"]:
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(f"{before}{START}\n{text}\n{END}{rest.partition(END)[2]}")
