"""The plugins of `docs/plugins`, installed as a stranger's packages: found, chosen, told about, stored, conforming."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pages
import pytest
from conftest import FOLDERS, Installed, conforms, sessions
from trivet.checkpoint.directory import manifest
from trivet.combination import KNOWN
from trivet.plugins import (
    Accelerator,
    Choice,
    Clip,
    Context,
    MicroBatch,
    Needs,
    OwnState,
    Policy,
    Precision,
    Scaling,
    StepResult,
    Strategy,
)
from trivet.testing import StrategySuite, cells

Command = Callable[..., tuple[int, str, str]]

MODEL = """
import torch, trivet
from torch.utils.data import DataLoader, TensorDataset

class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2)
"""

NAMES = {
    "allreduce": ("strategy", "allreduce"),
    "localsgd": ("strategy", "localsgd"),
    "ledger": ("accelerator", "ledger"),
    "stochastic": ("precision", "bf16-stochastic"),
}


@pytest.mark.parametrize("folders", [*sessions(*FOLDERS[:2]), *sessions(*FOLDERS[2:])], ids=" and ".join)
def test_conforms(folders: tuple[str, ...], installed: Installed) -> None:
    """Every cell with ``TRIVET_CI_FULL=1``, else a few: each counterpart, number of processes and check once."""
    conforms(installed, [installed.root / folder / f"test_{folder}.py" for folder in folders])


@pytest.mark.parametrize("folder", FOLDERS)
def test_is_short(folder: str, installed: Installed) -> None:
    lines = (installed.root / folder / f"trivet_{folder}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 80


def test_are_listed_with_distribution_and_version(trivet: Command) -> None:
    code, out, _ = trivet("plugins", "--json")
    found = {(row["kind"], row["name"]): (row["distribution"], row["version"]) for row in json.loads(out)}
    assert code == 0
    for folder, key in NAMES.items():
        assert found[key] == (f"trivet-{folder}", "1.0")


def test_options_are_flags_and_are_stored(trivet: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODEL))
    code, out, err = trivet("fit", "--strategy", "localsgd", "--help", cwd=tmp_path)
    assert code == 0, err
    assert "--strategy.period" in out
    assert "updates from one average to the next" in " ".join(out.split())
    code, out, err = trivet(
        "fit", "--model", "mine.Net", "--strategy", "localsgd", "--strategy.period", "8", "--accelerator", "ledger",
        "--precision", "bf16-stochastic", "--devices", "2", "--max_epochs", "1", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    (checkpoint,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    plan = manifest(checkpoint)["plan"]
    assert [plan[kind] for kind in ("strategy", "accelerator", "precision")] == [
        "localsgd",
        "ledger",
        "bf16-stochastic",
    ]
    assert plan["options"]["strategy"] == {"period": 8}
    assert plan["distributions"] == {
        "strategy": "trivet-localsgd", "accelerator": "trivet-ledger", "precision": "trivet-stochastic"
    }  # fmt: skip
    assert plan["versions"] == dict.fromkeys(("strategy", "accelerator", "precision"), "1.0")
    assert (plan["param_dtype"], plan["state_dtype"]) == ("bfloat16", "float32")


def test_what_one_does_not_offer_is_refused_with_both_names(trivet: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODEL))
    code, _, err = trivet("fit", "--model", "mine.Net", "--accelerator", "ledger", "--precision", "fp64", cwd=tmp_path)
    text = " ".join(err.split())
    assert code == 2
    assert "dtype:float64" in text
    assert "'ledger' (trivet-ledger 1.0)" in text
    assert "--accelerator cpu" in text


def test_a_wrong_option_is_an_error_of_the_plugins_own(trivet: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODEL))
    code, _, err = trivet(
        "fit", "--model", "mine.Net", "--strategy", "localsgd", "--strategy.period", "0", cwd=tmp_path
    )
    assert code == 2
    assert "localsgd: period=0 must be at least 1." in " ".join(err.split())


# ------------------------------------------------------------------------------------------------------------ the pages


@pytest.mark.parametrize(
    ("page", "base"), [("strategy", Strategy), ("accelerator", Accelerator), ("precision", Precision)]
)
def test_the_table_of_a_page_has_every_member(page: str, base: type) -> None:
    """Of the base class, and no other."""
    text = (pages.PAGES / f"{page}.md").read_text()
    table = text.split("## Every m")[1].split("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    told = set(re.findall(r"`(\w+)[^`]*`", cells))
    described = re.search(r"^Attributes: (.*?)(?:\n\n|\Z)", table, re.MULTILINE | re.DOTALL)
    told |= set(re.findall(r"`(\w+)`", described[1])) if described else set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    names = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    names |= {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert names - told == set(), "the page lacks them"
    assert {name for name in told if not hasattr(base, name) and name not in names} == set(), "there are no such"


def first_cells(page: str, before: str) -> set[str]:
    """The names in the first column of the table that follows these words."""
    text = (pages.PAGES / page).read_text()
    table = text.split(before, 1)[1].split("\n|", 1)[1].split("\n\n", 1)[0]
    return set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in ("|" + table).splitlines()[2:])))


@pytest.mark.parametrize(
    ("page", "before", "data"),
    [
        ("index.md", "four fields of `Needs`", Needs),
        ("strategy.md", "\n`Context`, for", Context),
        ("strategy.md", "\n`MicroBatch`, for", MicroBatch),
        ("strategy.md", "\n`Choice`, for", Choice),
        ("strategy.md", "\n`Clip`, for", Clip),
        ("strategy.md", "\n`StepResult`, from", StepResult),
        ("strategy.md", "\n`OwnState`, from", OwnState),
        ("precision.md", "\n`Policy`:", Policy),
        ("precision.md", "\n`Scaling`:", Scaling),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_table_of_what_is_passed_has_every_field(page: str, before: str, data: Any) -> None:
    assert first_cells(page, before) == {field.name for field in fields(data)}


def test_the_tables_of_names_checks_and_attributes_are_complete() -> None:
    assert first_cells("strategy.md", "\n## Names to offer") == KNOWN["strategy"]
    table = (pages.PAGES / "strategy.md").read_text().split("\n## Names to offer")[1].split("\n## ")[0]
    tested = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.rpartition(" | ")[2])}
    assert tested - {"wrap_optimizer"} == set(cells.TOGETHER) - {"resume"}, "resuming is no capability"
    attributes = {n for c in (StrategySuite, *StrategySuite.__mro__) for n, h in inspect.get_annotations(c).items()}
    assert first_cells("index.md", "What a class may say") == attributes - {"kind"}


def test_a_callback_a_logger_and_an_environment_are_chosen_by_name(trivet: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(MODEL).replace("return self", "self.log('loss', 1.0); return self")
    )
    flags = ["--model", "mine.Net", "--devices", "1", "--max_epochs", "9", "--log_every_n_steps", "1"]
    code, _, err = trivet("fit", *flags, "--logger", "lines", "--callbacks", "patience", cwd=tmp_path)
    assert code == 0, err
    (log,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert max(row["epoch"] for row in rows) == 3, "patience stopped the run"
    code, _, err = trivet("fit", *flags, cwd=tmp_path)
    assert code == 0, err
    assert len(list(tmp_path.rglob("metrics.jsonl"))) == 1
