"""What a suite finds beside training: what plugins say of themselves, what accelerators do, declared differences."""

from __future__ import annotations

from typing import Any

import pytest
from trivet import registry
from trivet.testing import Tolerance
from trivet.testing.apart import resume_when_alike, synchronises
from trivet.testing.declared import DECLARED
from trivet.testing.device import DEVICE
from trivet.testing.pool import Pools, TaskFailed
from trivet.testing.subject import Cell
from trivet.testing.tolerance import Terms

from . import mutants

LIES: dict[str, tuple[str, Any, str, str]] = {
    "option not kept": ("strategy", mutants.HidesAnOption, "options", r"\['period'\] are not kept"),
    "offers no frozenset": ("strategy", mutants.OffersASet(), "capabilities", "offers is .*expected a frozenset"),
    "environment": ("strategy", mutants.SetsTheEnvironment, "launching", "changes the environment"),
    "stores another dtype": (
        "precision",
        mutants.StoresFP32,
        "conversion",
        "bfloat16, and convert.. stores '0.weight'",
    ),
    "asks for no bfloat16": ("precision", mutants.AsksForNothing, "policy", "needs.accelerator does not ask for"),
}
DEVICE_LIES = {
    "cannot do a dtype": (mutants.OffersWhatItCannotDo, "dtypes", "offers 'dtype:float8_e4m3fn' and cannot do it"),
    "loses the nesting": (mutants.LosesTheNesting, "moving", "AttributeError|to_device makes list of dict"),
    "changes dtypes": (mutants.ForgetsTheBatch, "moving", "to_device makes torch.float32 of torch.int64"),
    "memory in words": (mutants.SaysMemoryInWords, "numbers", "'allocated': 'much'"),
    "no backend": (mutants.ConnectsNobody, "facts", "offers 'collectives', and collective_backend is None"),
}


@pytest.mark.parametrize("name", LIES)
def test_what_a_plugin_says_wrongly_of_itself_is_found(name: str) -> None:
    kind, spec, check, message = LIES[name]
    (found,) = [one for one in DECLARED[kind] if one.__name__ == check]
    with pytest.raises(AssertionError, match=message):
        found(registry.make(kind, spec), Terms())


@pytest.mark.parametrize("name", DEVICE_LIES)
def test_what_an_accelerator_does_wrongly_is_found(name: str, pools: Pools) -> None:
    spec, check, message = DEVICE_LIES[name]
    with pytest.raises(TaskFailed, match=message):
        pools[1].run(DEVICE[check], spec)


@pytest.mark.parametrize("check", DEVICE)
def test_an_accelerator_with_books_of_its_own_is_right(check: str, pools: Pools) -> None:
    pools[1].run(DEVICE[check], mutants.CoresAsDevices)


def test_a_batch_that_was_not_moved_is_found(pools: Pools) -> None:
    with pytest.raises(TaskFailed, match=r"to_device was called 0 times for 6 batches"):
        pools[1].run(unmoved)


def unmoved() -> None:
    """Task: the check of a run in which nothing is handed to the accelerator."""
    from trivet.engine import Engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "move", lambda self, batch: batch)
        DEVICE["life"](mutants.CoresAsDevices)


@pytest.mark.parametrize(("bound", "wide"), [(2e-2, False), (0.3, False), (1.0, True), (1e9, True)])
def test_a_tolerance_that_finds_nothing_is_refused(bound: float, wide: bool) -> None:
    (check,) = [one for one in DECLARED["strategy"] if one.__name__ == "tolerance"]
    terms = Terms(Tolerance(bound, bound, bound))
    if not wide:
        check(registry.make("strategy", "ddp"), terms)
        return
    with pytest.raises(AssertionError, match="so wide that gradients of half the samples pass"):
        check(registry.make("strategy", "ddp"), terms)


# ------------------------------------------------------------------------------------ ranks that differ by declaration


@pytest.mark.parametrize("check", [synchronises, resume_when_alike])
def test_local_sgd_passes_with_its_declaration(check: Any, pools: Pools) -> None:
    check(Cell(mutants.LocalSGD(), "fp32", 2), pools, Terms(synchronises_every=3))


@pytest.mark.parametrize(
    ("strategy", "period", "message"),
    [
        (mutants.LocalSGDThatNeverMeets(), 3, "after update 3 ranks differ"),
        (mutants.LocalSGD(period=5), 3, "after update 3 ranks differ"),
        (mutants.LocalSGDOfOneRank(), 3, "the loss over all samples fell from"),
        (mutants.TakesTheMeanOfMeans(), 3, "ranks are alike after every update: leave out synchronises_every"),
    ],
    ids=["never", "another period", "one rank's", "not apart"],
)
def test_what_the_declaration_does_not_cover_is_found(strategy: Any, period: int, message: str, pools: Pools) -> None:
    with pytest.raises(AssertionError, match=message):
        synchronises(Cell(strategy, "fp32", 2), pools, Terms(synchronises_every=period))
