"""What pytest loads of Trivet in every session: options, the pool of workers, and the table of cells at the end.

Importing this module imports neither torch nor a suite; that happens where a test file or an option asks for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from .report import Report

if TYPE_CHECKING:
    from .pool import Pools

KINDS = ("strategy", "accelerator", "precision")
ANCHOR = Path(__file__).with_name("suites.py")  # what is collected for the options
REPORT = pytest.StashKey[Report]()
PROPERTY = "trivet"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--trivet-strategy`` and its like, and ``--trivet-cells``."""
    group = parser.getgroup("trivet", "conformance of Trivet's plugins")
    for kind in KINDS:
        group.addoption(
            f"--trivet-{kind}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"run the conformance suite of this {kind} (an entry point's name); may be repeated. Without paths "
            "nothing else is run.",
        )
    group.addoption(
        "--trivet-cells",
        choices=("all", "cover", "few"),
        default=None,
        help="run all checks in all cells of the suites (the default), a cover that holds every pair of strategy, "
        "precision, accelerator, number of processes and check, or a few that hold each of them, and each reason to "
        "refuse, once.",
    )


def _asked_for(config: pytest.Config) -> list[tuple[str, str]]:
    return [(kind, name) for kind in KINDS for name in config.getoption(f"trivet_{kind}")]


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest collect the suites that the options name, and nothing else where no path was given."""
    config.stash[REPORT] = Report()
    named = _asked_for(config)
    if not named:
        return
    from .. import registry
    from ..errors import TrivetError

    try:
        for kind, name in named:
            registry.make(kind, name)
    except TrivetError as error:
        raise pytest.UsageError(str(error)) from error
    given = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args = [*given, str(ANCHOR)]


@pytest.hookimpl(optionalhook=True)  # of pytest 8: an older one must not fail because Trivet is installed
def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Trivet's own folders are not packages of tests: pytest would import them under other names."""
    if _asked_for(parent.config) and (path / "testing" / ANCHOR.name == ANCHOR or path == ANCHOR.parent):
        found: pytest.Collector = pytest.Dir.from_parent(parent, path=path)
        return found
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """A module with one suite for each plugin that the options name."""
    named = _asked_for(parent.config)
    if not named or module_path != ANCHOR:
        return None
    suites = import_module(f"{__package__}.suites").SUITES
    namespace = ModuleType(f"{__package__}.named")
    for kind, name in named:
        title = f"Test{kind.title()}_{re.sub(r'[^0-9a-zA-Z]', '_', name)}"
        setattr(namespace, title, type(title, (suites[kind],), {"plugin": name, "__module__": namespace.__name__}))
    module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid="trivet.testing")
    module.obj = namespace
    return module


# ----------------------------------------------------------------------------------------------- choosing and telling


def _asked(item: pytest.Item) -> Any:
    """What a suite asks in this test: an `Asked`; None where it asks nothing; False where it is no suite's test."""
    return getattr(getattr(item, "callspec", None), "params", {}).get("trivet_asked", False)


def _cover_of_each(items: list[pytest.Item], together: int) -> Iterator[Any]:
    """The pairs of cell and check that a cover of each suite wants."""
    cells = import_module(f"{__package__}.cells")
    suites: dict[Any, list[Any]] = {}
    for item in items:
        if (asked := _asked(item)) and asked.kind == "trains":
            # one cover for all of them, but each plugin is tried
            suites.setdefault(getattr(item, "cls", None) if together == 1 else None, []).append(
                (asked.cell, asked.check)
            )
    for trained in suites.values():
        yield from cells.cover(trained, together)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note every check for the table; leave out those that the cover does not want."""
    report = config.stash[REPORT]
    for item in items:
        asked = _asked(item)
        if asked and asked.kind == "trains":
            report.ask((*asked.cell.names, asked.cell.world_size), asked.check, asked.note)
    if not any(_asked(item) is not False for item in items):
        return
    cells = import_module(f"{__package__}.cells")
    together = {"cover": 2, "few": 1}.get(config.getoption("trivet_cells"))
    cover = set(_cover_of_each(items, together)) if together is not None else None
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        asked = _asked(item)
        missing = asked and asked.kind == "trains" and cover is not None and (asked.cell, asked.check) not in cover
        if asked and asked.kind == "refused":
            outcome = cells.outcome(asked.cell, cells.named(asked.check) if asked.check else None)
            reasons = [f"refused: {conflict}" for conflict in outcome.removeprefix("refused: ").split(" | ")]
            missing = together == 1 and set(reasons) <= set(report.reasons)  # few: each reason once
            report.reasons += reasons
            if missing:
                report.ask((*asked.cell.names, asked.cell.world_size), asked.check or "refusal", "")
        (left_out if asked is None or missing else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    for kind in KINDS:
        report.reasons += [f"left out: {text}" for text in cells.uninstalled(kind).values()]
    report.reasons += [f"left out: accelerator {name!r}: {text}" for name, text in cells.unavailable().items()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Give the report what the table wants to know, as plain data: it may go to another process."""
    report = yield
    if (asked := _asked(item)) and report.when == "call":
        place = (*asked.cell.names, asked.cell.world_size) if asked.cell is not None else None
        report.user_properties.append((PROPERTY, json.dumps([asked.kind, asked.label, asked.check, place])))
    return report


class _Collect:
    """Reads reports; registered for each session, since `pytest_runtest_logreport` is not told the config."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "call" and not report.skipped:
                test, label, check, place = json.loads(str(value))
                self.report.tell(test, label, check, tuple(place) if place is not None else None, report.passed)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to listen."""
    session.config.pluginmanager.register(_Collect(session.config.stash[REPORT]), "trivet-report")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table of cells, where a suite ran."""
    report = config.stash[REPORT]
    if not (report.ran or report.refused or report.alone):
        return
    terminalreporter.section("conformance")
    terminalreporter.write_line("\n".join(report.table()))
    terminalreporter.write_line(report.summary())


@pytest.fixture(scope="session")
def trivet_pools() -> Iterator[Pools]:
    """Worker processes by world size; those of a size start with its first task and live as long as the session."""
    pools: Pools = import_module(f"{__package__}.pool").Pools()
    yield pools
    pools.close()
