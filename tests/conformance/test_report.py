"""The table of cells, and the page that it is written into."""

from __future__ import annotations

from pathlib import Path

import pytest
from trivet.testing.report import Place, Report, write_between_marks

ONE: Place = ("mine", "fp32", "cpu", 1)
TWO: Place = ("mine", "fp32", "cpu", 2)


def test_the_table_tells_what_ran_failed_was_refused_and_was_left_out() -> None:
    report = Report()
    for place in (ONE, TWO, ("mine", "fp64", "cpu", 1)):
        for check in ("parity", "resume"):
            report.ask(place, check, "own tolerance" if place == ONE else "")
    report.tell("trains", "mine", "parity", ONE, True)
    report.tell("refused", "mine", "manual", ONE, True)
    report.tell("trains", "mine", "parity", TWO, False)
    report.tell("refused", "mine", "", ("mine", "fp64", "cpu", 2), True)
    report.tell("declares", "mine", "options", None, False)
    report.reasons += ["refused: because", "refused: because"]
    assert report.table() == [
        "| strategy | precision | accelerator | W = 1 | W = 2 |",
        "|---|---|---|---|---|",
        "| mine | fp32 | cpu | 1 ok, 1 left out, 1 refused (own tolerance) | FAILED: parity |",
        "| mine | fp64 | cpu | left out | refused |",
        "",
        "- mine, by itself: 0 of 1 ok; FAILED: options",
        "- refused: because",
    ]
    assert report.counts == (2, 4)
    assert report.summary() == "2 checks in cells ran, 4 were left out (--trivet-cells all runs all)."


def test_a_run_that_trained_nothing_says_so() -> None:
    report = Report()
    assert report.summary() == "0 checks in cells ran, 0 were left out."
    report.tell("refused", "mine", "", ONE, True)
    assert report.summary().startswith("0 checks in cells ran: negotiation refuses every cell, so nothing was trained.")


@pytest.mark.parametrize("name", ["measured", "deepspeed"])
def test_a_page_is_written_between_its_marks(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\nafter\n")
    write_between_marks(page, ["new"], name)
    assert page.read_text() == f"before\n<!-- {name}: begin -->\n\nnew\n\n<!-- {name}: end -->\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match=f"has no lines '<!-- {name}: begin"):
        write_between_marks(page, ["new"], name)
