"""The matrix as it is on record, and the tools that the suites are made of."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from trivet.testing import cells, reference
from trivet.testing.pool import Pool, TaskFailed

from . import record


def test_every_cell_has_the_outcome_on_record() -> None:
    assert cells.outcomes() == record.expected(), (
        "regenerate with `python -m conformance.record --write`, and look at it"
    )


def test_the_cover_holds_every_pair_of_values() -> None:
    def pairs(chosen: list[cells.Item]) -> set[object]:
        values = [(c.strategy, c.precision, c.world_size, check) for c, check in chosen]
        return {(i, v[i], j, v[j]) for v in values for i in range(4) for j in range(i)}

    everything = cells.items(record.admitted(cells.all_cells()))
    chosen = cells.cover(everything)
    assert pairs(chosen) == pairs(everything)
    assert len(chosen) < len(everything) / 2


def test_few_hold_every_value() -> None:
    def values(chosen: list[cells.Item]) -> set[object]:
        return {value for c, check in chosen for value in (*c.names, c.world_size, check)}

    everything = cells.items(record.admitted(cells.all_cells()))
    chosen = cells.cover(everything, 1)
    assert values(chosen) == values(everything)
    assert len(chosen) <= 2 * len({check for _, check in everything})


def test_the_reference_imports_nothing_of_trivet() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {"." * n.level + (n.module or "") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names == {"__future__", "collections.abc", "contextlib", "dataclasses", "torch", "typing"}


# ------------------------------------------------------------------------------------------------------------- the pool


def stuck_on_rank(rank: int) -> int:
    import os
    import time

    if int(os.environ["RANK"]) == rank:
        time.sleep(600)
    return int(os.environ["RANK"])


def raising_on_rank(rank: int) -> int:
    import os

    if int(os.environ["RANK"]) == rank:
        raise ValueError(f"from rank {rank}")
    return os.getpid()


def test_a_stuck_task_fails_with_stacks_and_the_pool_starts_anew() -> None:
    pool = Pool(2)
    try:
        assert pool.run(stuck_on_rank, 5) == [0, 1]
        with pytest.raises(TaskFailed, match=r"(?s)rank 1: TimeoutError.*stuck_on_rank"):
            pool.run(stuck_on_rank, 1, timeout_s=2.0)
        with pytest.raises(TaskFailed, match="ValueError: from rank 0") as caught:
            pool.run(raising_on_rank, 0)
        assert list(caught.value.failures) == [0]
        assert pool.run(raising_on_rank, 9) == pool.run(raising_on_rank, 9), "processes are kept"
        assert pool.starts == 2
    finally:
        pool.close()
