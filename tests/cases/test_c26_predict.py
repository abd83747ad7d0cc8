"""C26: predict over two processes returns every prediction once, in the order of the data set."""

import pytest
import scalar
from ranks import run


class Returns(scalar.Scalar):
    def predict_step(self, batch, batch_idx):
        return batch


def predict(batch_size):
    return [batch.tolist() for batch in scalar.trainer().predict(Returns(), scalar.loader(5, batch_size))]


RIGHT = {1: [[0.0], [1.0], [2.0], [3.0], [4.0]], 2: [[0.0, 1.0], [2.0, 3.0], [4.0]]}


@pytest.mark.parametrize("batch_size", RIGHT)
@pytest.mark.parametrize("world_size", [1, 2])
def test_in_the_order_of_the_data_set_on_all_ranks(world_size, batch_size):
    assert run(world_size, predict, batch_size) == [RIGHT[batch_size]] * world_size


def test_the_caller_of_launched_processes_gets_it_too():
    trainer = scalar.trainer(devices=2, strategy="ddp")
    assert [batch.tolist() for batch in trainer.predict(Returns(), scalar.loader(5, 2))] == RIGHT[2]
