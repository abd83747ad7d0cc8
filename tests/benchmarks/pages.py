"""What benchmarks have in common: their options, and the part of a page of the docs that each writes."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(about: str, rounds: int) -> argparse.ArgumentParser:
    """With the options that all have."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between the markers of this page")
    return made


def show(text: str, page: Path | None, start: str, end: str) -> None:
    """Print the text, and put it into the page that was asked for."""
    print(text)
    if page is not None:
        put(page, text, start, end)


def put(path: Path, text: str, start: str, end: str) -> None:
    """Put the text between two markers of a page."""
    page = path.read_text()
    if start not in page or end not in page:
        raise SystemExit(f"{path} has no lines {start} and {end}, between which the tables go.")
    before, after = page.split(start)[0], page.split(end)[1]
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}")
