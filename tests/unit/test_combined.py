"""CombinedLoader: several loaders in one batch, in training, validation and prediction, on any number of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from trivet.data.combined import CombinedLoader
from trivet.data.train import TrainData
from trivet.errors import ConfigurationError, DataError


def two(mode: str) -> CombinedLoader:
    """Five batches of one, and three batches of two."""
    return CombinedLoader({"a": scalar.loader(5), "b": scalar.loader(range(10, 16), 2)}, mode)


FIVE, THREE = [[float(x)] for x in range(5)], [[10.0, 11.0], [12.0, 13.0], [14.0, 15.0]]
RIGHT = {
    "min_size": list(zip(FIVE, THREE)),  # noqa: B905
    "max_size": list(itertools.zip_longest(FIVE, THREE)),
    "max_size_cycle": list(zip(FIVE, [*THREE, *THREE])),  # noqa: B905
}


def plain(batch: Any) -> Any:
    return tuple(None if part is None else part.tolist() for part in batch.values())


class Sees(scalar.Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((batch_idx, plain(batch)))
        return self.w * batch["a"].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, plain(batch)))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return plain(batch)


@pytest.mark.parametrize("mode", RIGHT)
def test_reading_it_plainly(mode: str) -> None:
    assert [plain(batch) for batch in two(mode)] == RIGHT[mode]
    assert len(two(mode)) == len(RIGHT[mode])


def test_sequential() -> None:
    loader = two("sequential")
    assert [batch.tolist() for batch in loader] == FIVE + THREE
    assert len(loader) == 8
    with pytest.raises(ConfigurationError, match="cannot be trained on"):
        scalar.trainer().fit(Sees(), loader)


def test_nested_structures() -> None:
    loader = CombinedLoader([scalar.loader(1), {"x": scalar.loader(1), "y": (scalar.loader(1),)}])
    (batch,) = loader
    assert batch == [torch.zeros(1), {"x": torch.zeros(1), "y": (torch.zeros(1),)}]
    with pytest.raises(ConfigurationError, match=r"mode='shortest'.: allowed are 'min_size', 'max_size_cycle'"):
        CombinedLoader([], "shortest")


def stages(mode: str) -> tuple[list[Any], list[Any], Any]:
    module, other = Sees(), Sees()
    scalar.trainer(strategy="auto").fit(module, two(mode))
    scalar.trainer().validate(other, two(mode))
    return module.seen, other.seen, scalar.trainer().predict(Sees(), two(mode))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", RIGHT)
def test_each_batch_once_and_in_order(mode: str, world_size: int) -> None:
    ranks = run(world_size, stages, mode)
    trained = [[batch for _, batch in seen] for seen, _, _ in ranks]
    joined = [batch for turn in itertools.zip_longest(*trained) for batch in turn if batch is not None]
    assert joined == RIGHT[mode]
    assert sorted(seen for _, validated, _ in ranks for seen in validated) == sorted(enumerate(RIGHT[mode]))
    assert all(predicted == RIGHT[mode] for _, _, predicted in ranks)


def test_a_dict_of_loaders_is_read_until_the_longest_ends() -> None:
    module = Sees()
    scalar.trainer(accumulate_grad_batches=2).fit(module, two("min_size").iterables)
    assert [batch for _, batch in module.seen] == RIGHT["max_size_cycle"]


class Weighted(Sees):
    def batch_weight(self, batch: Any) -> float:
        return float(len(batch["a"]))


def test_a_batch_counts_all_its_samples_unless_said_otherwise() -> None:
    """Parts of 2 and 1 samples of a, with 1 and 4 of b: w moves by (0.5 * 3 + 2 * 5) / 8, or (0.5 * 2 + 2 * 1) / 3."""
    loaders = {"a": scalar.loader(3, 2), "b": DataLoader(scalar.Numbers(5), batch_sampler=[[0], [1, 2, 3, 4]])}
    for kind, right in ((Sees, -11.5 / 8), (Weighted, -1.0)):
        module = kind()
        scalar.trainer(accumulate_grad_batches=2).fit(module, loaders)
        assert module.w.item() == pytest.approx(right)


def test_a_shorter_loader_begins_anew_in_another_order() -> None:
    module = Sees()
    loaders = {"a": scalar.loader(12), "b": scalar.loader(6, shuffle=True)}
    scalar.trainer().fit(module, loaders)
    order = [b[0] for _, (_, b) in module.seen]
    assert sorted(order[:6]) == sorted(order[6:]) == list(range(6))
    assert order[:6] != order[6:]


def test_resumed_in_the_middle_of_an_epoch(tmp_path: Any) -> None:
    loaders = {"a": scalar.loader(7, shuffle=True), "b": scalar.loader(3, shuffle=True)}

    def train(steps: int, path: Any = None) -> tuple[Sees, trivet.Trainer]:
        module, trainer = Sees(), scalar.trainer(max_steps=steps, max_epochs=2)
        torch.manual_seed(1)
        trainer.fit(module, loaders, ckpt_path=path)
        return module, trainer

    whole, _ = train(14)
    first, trainer = train(5)
    trainer.save_checkpoint(tmp_path / "five")
    rest, _ = train(14, tmp_path / "five")
    assert first.seen + rest.seen == whole.seen
    with pytest.raises(DataError, match=r"was of 2 loaders, this CombinedLoader holds 1"):
        scalar.trainer(max_steps=9).fit(Sees(), {"a": scalar.loader(7)}, ckpt_path=tmp_path / "five")


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return (torch.tensor(float(n)) for n in itertools.count())


def test_with_data_that_is_not_read_by_index() -> None:
    loader = CombinedLoader({"a": scalar.loader(2), "b": DataLoader(Endless(), 1)})
    module = Sees()
    scalar.trainer().fit(module, loader)
    assert [batch for _, batch in module.seen] == [([0.0], [0.0]), ([1.0], [1.0])]
    from trivet.data.combined import is_dealt

    with pytest.raises(DataError, match=r"holds DataLoader over Endless, .* cannot be dealt among 2 processes"):
        is_dealt(loader, 2)


class Dealt(IterableDataset[Tensor]):
    """Of ``values`` those of one rank."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def shard(self, *, rank: int, world_size: int) -> Dealt:
        return Dealt(self.values[rank::world_size])

    def __iter__(self) -> Any:
        return (torch.tensor(value) for value in self.values)


def test_data_that_shards_itself_is_combined_on_any_number_of_ranks() -> None:
    def fit(parts: dict[str, Any]) -> Any:
        module = Sees()
        scalar.trainer(max_epochs=1).fit(module, CombinedLoader(parts, "max_size"))
        return [batch for _, batch in module.seen]

    several = {"a": DataLoader(Dealt([0.0, 1.0, 2.0, 3.0]), 1), "b": DataLoader(Dealt([5.0, 6.0]), 1)}
    assert run(2, fit, several) == [[([0.0], [5.0]), ([2.0], None)], [([1.0], [6.0]), ([3.0], None)]]
    for odd, message in (
        (Endless(), r"all read the same samples. Either give .* a method shard"),
        ([torch.ones(1)], r"cannot be dealt among 2 processes as those of DataLoader over list"),
    ):
        mixed = CombinedLoader([several["a"], DataLoader(odd, 1)])
        with pytest.raises(DataError, match=message):
            TrainData(mixed, rank=0, world_size=2, accumulate=1, seed=0)


def test_limits() -> None:
    module = Sees()
    trainer = scalar.trainer(limit_train_batches=2, limit_predict_batches=0.4)
    trainer.fit(module, two("max_size"))
    assert [batch for _, batch in module.seen] == RIGHT["max_size"][:2]
    assert trainer.predict(Sees(), two("max_size_cycle")) == RIGHT["max_size_cycle"][:2]
