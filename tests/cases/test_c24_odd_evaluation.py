"""C24: evaluation over an odd number of samples counts each once, on any number of processes."""

import pytest
import scalar
from ranks import run


class Evaluated(scalar.Scalar):
    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        self.log("mean", batch.mean(), on_epoch=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


def evaluate(entry, batch_size):
    module = Evaluated()
    (metrics,) = getattr(scalar.trainer(), entry)(module, scalar.loader(5, batch_size))
    return metrics, module.seen


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("entry", ["validate", "test"])
def test_the_mean_is_two_on_all_ranks(entry, world_size, batch_size):
    ranks = run(world_size, evaluate, entry, batch_size)
    assert [metrics for metrics, _ in ranks] == [{"mean": 2.0}] * world_size
    assert sorted(x for _, seen in ranks for x in seen) == [0.0, 1.0, 2.0, 3.0, 4.0]
