"""Text for a terminal of 80 columns: tables, and paragraphs with a hanging indent."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 80


def table(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Rows as lines with aligned columns; see `aligned`."""
    return [line for lines in aligned(rows, indent=indent) for line in lines]


def aligned(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[list[str]]:
    """The lines of each row. The last column is folded into what is left of the width, or goes below."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    found = []
    for row in rows:
        head = indent + "".join(cell.ljust(width) + "  " for cell, width in zip(row, widths, strict=False))
        if len(head) > WIDTH // 2 and len(head) + len(row[-1]) > WIDTH:
            found.append([head.rstrip(), *fill(f"{indent}    ", row[-1])])
        else:
            found.append(fill(head, row[-1]))
    return found


def fill(head: str, text: str, *, indent: int | None = None, width: int = WIDTH) -> list[str]:
    """``head`` and a paragraph, folded between words; further lines are indented below its start."""
    hanging = " " * (len(head) if indent is None else indent)
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    ) or [head.rstrip()]


def for_terminal(text: str) -> str:
    """A message folded between words where a terminal would fold within them; as it is where it goes elsewhere."""
    if not sys.stderr.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    lines = []
    for line in text.splitlines():
        start = re.match(r" *(- )?", line)
        head = start[0] if start else ""
        lines += fill(head, line[len(head) :], indent=len(head), width=width) if line.strip() else [line]
    return "\n".join(lines)
