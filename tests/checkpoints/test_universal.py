"""Whatever one strategy wrote on one number of processes, each other reads on each other number, and goes on from it.

With TRIVET_CI_FULL=1 all pairs; otherwise `universal_runs.cover`. The table is printed at the end; with
TRIVET_CHECKPOINT_TABLE=docs/checkpoints.md a full and passing one is written into that page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from full import FULL
from torch import Tensor
from trivet.checkpoint import directory
from trivet.testing.checks import same
from trivet.testing.pool import Pools
from universal_runs import PAIRS, PLACES, SAVED_AT, UPDATES, Pair, Place, Seen, cover, read, write
from universal_table import TABLE

CHOSEN = PAIRS if FULL else cover(PAIRS)
AFTER = range(SAVED_AT + 1, UPDATES + 1)


class Written:
    """The checkpoints and what was seen of the runs that wrote them; each run happens once."""

    def __init__(self, pools: Pools, folder: Path) -> None:
        self.pools, self.folder, self.seen = pools, folder, dict[Place, list[Seen]]()

    def path(self, place: Place) -> Path:
        return self.folder / str(place)

    def __getitem__(self, place: Place) -> list[Seen]:
        if place not in self.seen:
            self.seen[place] = self.pools[place.world_size].run(write, place, self.path(place))
        return self.seen[place]


@pytest.fixture(scope="module")
def written(trivet_pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(trivet_pools, tmp_path_factory.mktemp("universal"))


def apart(found: Any, expected: Any) -> float:
    """The largest difference of two tensors in the same place of two nestings. Everything else has to be equal."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return max((apart(found[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, list):
        assert len(found) == len(expected)
        return max(map(apart, found, expected), default=0.0)
    if isinstance(expected, Tensor) and expected.is_floating_point():
        assert found.shape == expected.shape
        return float((found.double() - expected.double()).abs().max())
    same(found, expected, "a value")
    return 0.0


def samples(seen: list[Seen], update: int) -> list[int]:
    return sorted(index for one in seen for index in one.samples[update])


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_checkpoint_holds_the_gathered_state_by_name(place: Place, written: Written) -> None:
    """Read without a process group; and it is the state that one process would have, up to the order of additions."""
    live = written[place][0].states[SAVED_AT]
    stored = directory.read(written.path(place))
    same(stored.module, live["weights"], "weights")
    (optimizer,) = stored.optimizers
    same(optimizer["state"], live["optimizer"], "optimizer state")
    same(optimizer["groups"], live["groups"], "groups")
    trained = {name for group in optimizer["groups"] for name in group["params"]}
    assert trained - set(optimizer["state"]) == {"unused", "frozen.weight", "frozen.bias"}
    assert torch.equal(stored.module["head.weight"], stored.module["embedding.weight"])
    assert "head.weight" not in trained
    assert stored.module["updates"] == SAVED_AT
    alone = written[Place("single", 1)][0]
    for update in (SAVED_AT, UPDATES):
        assert apart(written[place][0].states[update], alone.states[update]) <= 1e-6
    for update in range(1, UPDATES + 1):
        assert samples(written[place], update) == sorted(alone.samples[update])


@pytest.mark.parametrize("pair", CHOSEN, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def test_is_read_and_trained_on(pair: Pair, written: Written, trivet_pools: Pools) -> None:
    writer, reader = pair
    TABLE[pair] = None
    unbroken = written[writer]
    resumed: list[Seen] = trivet_pools[reader.world_size].run(read, reader, written.path(writer))
    distance = 0.0
    for rank, one in enumerate(resumed):
        assert list(one.states) == [SAVED_AT, *AFTER]
        same(one.states[SAVED_AT], unbroken[0].states[SAVED_AT], f"on rank {rank}: what was read")
        distance = max(distance, *(apart(one.states[n], unbroken[0].states[n]) for n in AFTER))
    for update in AFTER:
        assert samples(resumed, update) == samples(unbroken, update)
    assert distance <= (0.0 if reader == writer else 1e-6)
    TABLE[pair] = distance


def test_the_cover_has_every_writer_every_reader_and_every_pair_of_their_kinds() -> None:
    chosen = cover(PAIRS)
    assert {w for w, _ in chosen} == {r for _, r in chosen} == set(PLACES)
    for value in (lambda place: place.strategy, lambda place: place.world_size):
        assert {(value(w), value(r)) for w, r in chosen} == {(value(w), value(r)) for w, r in PAIRS}
    assert len(chosen) < len(PAIRS) / 5
