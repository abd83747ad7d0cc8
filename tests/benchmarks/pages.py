"""The part of a page of the docs that a benchmark writes."""

from __future__ import annotations

from pathlib import Path


def put(path: Path, text: str, start: str, end: str) -> None:
    """Put the text between two markers of a page."""
    page = path.read_text()
    if start not in page or end not in page:
        raise SystemExit(f"{path} has no lines {start} and {end}, between which the tables go.")
    before, after = page.split(start)[0], page.split(end)[1]
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
