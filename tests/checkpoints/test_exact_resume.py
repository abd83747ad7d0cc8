"""train(2n) == train(n) + resume(n), to the bit, wherever it is interrupted.

The data are shuffled and augmented with random numbers of Python, numpy and torch; the model has dropout and a metric
of torchmetrics; there are a step, an epoch and a plateau schedule, early stopping, and the two best checkpoints are
kept. With TRIVET_CI_FULL=1 all cases; otherwise `exact_runs.cover`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chosen import chosen
from exact_runs import EPOCHS, SAMPLES, Case, cases, cover, resumed
from trivet.testing.checks import same
from trivet.testing.pool import Pools

EVERY = cases()
CHOSEN = chosen("exact resume", EVERY, cover(EVERY))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(case: Case, trivet_pools: Pools, tmp_path: Path) -> None:
    ranks = trivet_pools[case.world_size].run(resumed, case, tmp_path)
    for rank, (whole, first, rest) in enumerate(ranks):
        who = f"on rank {rank}: "
        assert 0 < len(first.steps) < len(whole.steps)
        same(first.steps + rest.steps, whole.steps, f"{who}epoch, samples and loss")
        same(rest.end, whole.end, f"{who}at the end")
        if not case.workers:  # with workers the interrupted run has read ahead
            assert first.reads == sum(len(index) for _, index, _ in first.steps)
        assert rest.reads == sum(len(index) for _, index, _ in rest.steps), f"{who}samples were read and thrown away"
    trained = sum(len(index) for whole, *_ in ranks for _, index, _ in whole.steps)
    assert trained == EPOCHS * SAMPLES


def test_the_cover_has_every_value() -> None:
    covered = cover(EVERY)
    for name in ("strategy", "precision", "accumulate", "workers", "place"):
        assert {getattr(case, name) for case in covered} == {getattr(case, name) for case in EVERY}
