"""`trivet plugins --matrix`: every combination as negotiation answers it, and the page of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distributions import GOOD, Install
from trivet.__main__ import main
from trivet.capabilities import resolve
from trivet.commands import matrix
from trivet.errors import PlanError

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "matrix.md"
PICKY = """
    from trivet.plugins import Needs, Policy, Precision

    class Picky(Precision):
        policy = Policy()
        needs = Needs(strategy=frozenset({"sharpness"}))

    class Asking(Precision):
        policy = Policy()
        def __init__(self, bits: int) -> None: ...
"""


def test_the_page_is_current() -> None:
    """Write it anew: trivet plugins --matrix --portable --markdown > docs/plugins/matrix.md"""
    assert PAGE.read_text() == matrix.as_markdown(matrix.matrix(portable=True)) + "\n"


def test_each_cell_is_what_resolve_says() -> None:
    found = matrix.matrix()
    assert {cell.world_size for cell in found.cells} == {1, 2}
    for cell in found.cells:
        if cell.accelerator != "cpu" or cell.precision not in ("fp32", "fp16-mixed"):
            continue
        told: list[str] = []
        try:
            resolve(strategy=cell.strategy, accelerator="cpu", precision=cell.precision, devices=cell.world_size)
        except PlanError as error:
            told = [conflict.reason for conflict in error.conflicts]
        assert [reason.partition(": ")[2] for reason in cell.reasons] == told


def test_refusals_are_footnotes_and_the_text_fits_a_terminal(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("acme_picky", "picky = acme_picky:Picky\nasking = acme_picky:Asking", PICKY)
    install("acme_good", "fp32 = acme_good:Good", GOOD)
    install("acme_torn", "torn = acme_torn:Torn", "import acme_missing")
    for number in range(6):
        install(f"acme_long_{number}", f"a-precision-with-a-long-name-{number} = acme_long_{number}:Good", GOOD)
    assert main(["plugins", "--matrix"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if "acme_torn.py" not in line) <= 80  # a path is not folded
    words = " ".join(text.split())
    assert "precision 'picky' and strategy 'ddp': the first wants 'sharpness', which the second" in words
    assert "2 processes and strategy 'single': the first wants 'several_processes'" in words
    assert "acme_good:fp32" in words
    assert "trivet:fp32" in words
    assert "left out: precision 'asking' (acme_picky 1.2) needs 'bits'." in words
    assert "left out: precision 'torn' (acme_torn 1.2) cannot be loaded" in words
    assert main(["plugins", "--matrix", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    picky = [cell for cell in data["cells"] if cell["precision"] == "picky"]
    assert picky
    assert not any(cell["admitted"] for cell in picky)
    assert any(cell["admitted"] for cell in data["cells"])
    assert "acme" not in matrix.as_markdown(matrix.matrix(portable=True))


def test_flags_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["strategy", "--matrix"], ["--check", "--matrix"], ["--markdown"], ["--portable", "--json"]):
        assert main(["plugins", *argv]) == 2
        assert "--matrix" in capsys.readouterr().err
