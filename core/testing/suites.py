"""The suites that a plugin author subclasses: every conformance check of one plugin, against all of Trivet's own.

A subclass names its plugin, and needs no conftest; the fixtures and the table come from `trivet.testing.pytest_plugin`,
which pytest loads by its entry point.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch

from ..errors import PlanError, TrivetError
from ..registry import Selected
from . import cells, subject
from .checks import Check
from .declared import DECLARED
from .device import DEVICE
from .pool import Pools, TaskFailed
from .reference import Recipe
from .subject import Cell, name_of
from .tolerance import Terms, Tolerance


@dataclass(frozen=True)
class Asked:
    """One test of a suite: a check, and the cell that it runs in where it runs in one. ``kind`` names the test."""

    kind: str
    label: str
    check: str
    cell: Cell | None = None
    note: str = ""
    broken: str = ""  # why nothing can be asked; of a device that is not here, why it is skipped

    @property
    def id(self) -> str:
        """What stands in brackets behind the test's name."""
        return "-".join(part for part in (str(self.cell or self.label), self.check) if part)


class Suite:
    """What the three suites share. Subclass one of them, not this class.

    ``plugin``: what is tested, in every form in which a Trainer takes it: an entry point's name, a class, an object, or
    a mapping with options. ``world_sizes``: numbers of processes. ``timeout_s``: the limit of one training on them.
    ``strategies``, ``accelerators``, ``precisions``: the counterparts, all of Trivet's own that can be used here where
    it is None. ``tolerance``: how far runs may be from the reference where that is more than their dtypes allow; a test
    sees to it that it is narrow enough to find wrong training, and the table tells that there is one.
    """

    kind: ClassVar[str]
    plugin: ClassVar[Any] = None
    world_sizes: ClassVar[tuple[int, ...]] = cells.WORLD_SIZES
    timeout_s: ClassVar[float] = 60.0
    tolerance: ClassVar[Tolerance | None] = None
    strategies: ClassVar[tuple[Any, ...] | None] = None
    accelerators: ClassVar[tuple[Any, ...] | None] = None
    precisions: ClassVar[tuple[Any, ...] | None] = None
    __test__ = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__test__ = cls.plugin is not None

    # -------------------------------------------------------------------------------------------------------- what runs

    @classmethod
    def terms(cls) -> Terms:
        """What the suite declares of its plugin."""
        return Terms(cls.tolerance, 1, cls.timeout_s)

    @classmethod
    def selected(cls) -> Selected:
        """The plugin, as the registry makes it. Raises what `registry.make` raises."""
        return subject.made(cls.kind, cls.plugin)

    @classmethod
    def cells(cls) -> list[Cell]:
        """Every combination of the plugin with its counterparts and world sizes; one of an unavailable accelerator."""
        given = {"strategy": cls.strategies, "accelerator": cls.accelerators, "precision": cls.precisions}
        sides = {kind: cells.here(kind) if names is None else names for kind, names in given.items()}
        sides[cls.kind] = (cls.plugin,)
        everything = product(sides["strategy"], sides["precision"], cls.world_sizes, sides["accelerator"])
        found = [Cell(*values) for values in everything]
        if cls.kind == "accelerator" and not cls.selected().plugin.is_available():
            return found[:1]
        return found

    @classmethod
    def asked(cls, test: str) -> Iterator[Asked]:
        """What one of the test functions below is called with, in order."""
        name, note = name_of(cls.plugin), cls.terms().note()
        if test == "declares":
            yield from (Asked(test, name, check.__name__) for check in DECLARED[cls.kind])
            return
        if test == "device":
            if cls.kind == "accelerator":
                plugin = cls.selected().plugin
                if plugin.is_available():
                    yield from (Asked(test, name, task) for task in DEVICE)
                else:
                    why = f"{cls.selected()} is not available here: {plugin.unavailable_reason()}"
                    yield Asked(test, name, "untried", broken=f"{why}; neither its device nor training is tried")
            return
        everything = cls.cells()
        if test == "refused":
            for cell, check in cells.refused(everything, cls.terms()):
                yield Asked(test, name, check, cell, note)
            return
        admitted = [cell for cell in everything if cells.outcome(cell) == "ok"]
        for cell, check in cells.items(admitted, cls.terms()):
            yield Asked(test, name, check, cell, note)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per check and cell. Called by pytest when it collects the class."""
        if "trivet_asked" not in metafunc.fixturenames:
            return
        test = getattr(metafunc.function, "asks", "")
        try:
            by_value(self.plugin, type(self).__module__)
            self.selected()
            found: list[Asked | None] = list(self.asked(test))
        except TrivetError as error:  # a failure of this class, and the end of no other
            text = f"{type(self).__name__}: {error}"
            found = [Asked(test, name_of(self.plugin), "loads", broken=text)] if test == "declares" else []
        found = found or [None]  # left out by the pytest plugin
        metafunc.parametrize("trivet_asked", found, ids=[one.id if one is not None else "none" for one in found])

    # ------------------------------------------------------------------------------------------------------- the tests

    def test_says_what_is_true(self, trivet_asked: Asked) -> None:
        """What the plugin says of itself before anything runs."""
        told(trivet_asked.broken)
        check = next(check for check in DECLARED[self.kind] if check.__name__ == trivet_asked.check)
        text = ""
        try:
            check(self.selected(), self.terms())
        except AssertionError as error:
            text = f"{self.selected()}: {error}"
        told(text)

    test_says_what_is_true.asks = "declares"  # type: ignore[attr-defined]

    def test_device(self, trivet_asked: Asked, trivet_pools: Pools) -> None:
        """What an accelerator does with its device, in one worker."""
        if trivet_asked.broken:
            pytest.skip(trivet_asked.broken)
        text = ""
        try:
            trivet_pools[1].run(DEVICE[trivet_asked.check], self.plugin, timeout_s=self.timeout_s)
        except TaskFailed as error:
            failure = error.failures[0]
            found = failure.message if failure.type_name == "AssertionError" else error
            text = f"{self.selected()}: {found}"
        told(text)

    test_device.asks = "device"  # type: ignore[attr-defined]

    def test_trains_like_the_reference(self, trivet_asked: Asked, trivet_pools: Pools) -> None:
        """A check of training in a cell that negotiation admits."""
        assert trivet_asked.cell is not None
        check = cells.named(trivet_asked.check)
        text = ""
        try:
            check.run(trivet_asked.cell, trivet_pools, self.terms())
        except (AssertionError, TaskFailed) as error:
            text = f"{self.blame(check, trivet_asked.cell)}\n{error}"
        told(text)

    test_trains_like_the_reference.asks = "trains"  # type: ignore[attr-defined]

    def test_is_refused(self, trivet_asked: Asked, trivet_pools: Pools) -> None:
        """What negotiation does not admit is refused on all ranks, before anything starts, with a remedy."""
        cell = trivet_asked.cell
        assert cell is not None
        check = cells.named(trivet_asked.check) if trivet_asked.check else None
        expected = cells.outcome(cell, check)
        answers = trivet_pools[cell.world_size].run(refusal, cell, check, timeout_s=self.timeout_s)
        for rank, (found, improper) in enumerate(answers):
            assert found == expected, f"{cell} on rank {rank}: {found}, expected {expected}"
            assert not improper, f"{cell} on rank {rank}: {improper}"

    test_is_refused.asks = "refused"  # type: ignore[attr-defined]

    def blame(self, check: Check, cell: Cell) -> str:
        """The first line of a failure: the plugin, and what it said that is not so."""
        who, tested = str(self.selected()), f"{check.name} in {cell}"
        alone = check.offer == "several_processes" and cell.world_size == 1
        if self.kind != "strategy" or not check.offer or alone:
            return f"{who} does not train like the reference ({tested}):"
        return f"{who} offers {check.offer!r} and does not train like the reference with it ({tested}):"


class StrategySuite(Suite):
    """All checks of a strategy, against Trivet's precisions and accelerators.

    ``synchronises_every``: more than 1 says that by design ranks differ between so many updates, as in local SGD; left
    out, it is what the strategy's attribute of this name says. On one process the strategy is held to the reference all
    the same; on several it is checked that ranks are alike then and differ in between, that training falls like the
    reference, and that a run resumed at such an update is exact.
    """

    kind = "strategy"
    synchronises_every: ClassVar[int | None] = None

    @classmethod
    def terms(cls) -> Terms:
        every = cls.synchronises_every or cls.selected().plugin.synchronises_every
        return Terms(cls.tolerance, every, cls.timeout_s)


class AcceleratorSuite(Suite):
    """All checks of an accelerator, against Trivet's strategies and precisions; needs such a device for most."""

    kind = "accelerator"


class PrecisionSuite(Suite):
    """All checks of a precision, against Trivet's strategies and accelerators."""

    kind = "precision"


SUITES: Mapping[str, type[Suite]] = {suite.kind: suite for suite in (StrategySuite, AcceleratorSuite, PrecisionSuite)}


def told(text: str) -> None:
    """Fail with this text, if it is one; outside of the handler, so that pytest does not show the cause, too."""
    if text:
        pytest.fail(text, pytrace=False)


def by_value(plugin: Any, module: str) -> None:
    """Send a plugin that is defined in the test file itself to workers as code: they may not be able to import it."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    if cls.__module__ == module and module in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[module])


def refusal(cell: Cell, check: Check | None) -> tuple[str, str]:
    """Task: what the run says that is not admitted, and what is wrong with that, or an empty string."""
    asks = check.asks if check is not None else {}
    clip = asks.get("clip")
    recipe = Recipe(
        accumulate=asks.get("accumulate", 1),
        manual=asks.get("manual", False),
        clip=clip and clip.value,
        algorithm=clip.algorithm if clip else "norm",
        skip_at=1 if asks.get("on_skip") else None,
    )
    try:
        cell.trainer(recipe).fit(subject.Subject(recipe), subject.loader(recipe))
    except PlanError as error:
        improper = [
            f"no remedy is named for {' and '.join(conflict.parties)}: {conflict.reason}"
            for conflict in error.conflicts
            if not conflict.remedy or not conflict.reason
        ]
        if torch.distributed.is_initialized():
            improper.append("a process group was started")
        return "refused: " + cells.refusal(error), "; ".join(improper)
    return "ok", ""
