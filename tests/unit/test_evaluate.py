"""validate, test and predict are exact: each sample once, on any number of processes, under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scalar
import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trivet.callbacks.prediction_writer import PredictionWriter
from trivet.errors import ConfigurationError
from trivet.testing.pool import Pool

CELLS = [("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4), ("zero3", 2)]


class Mean(nn.Module):
    """Accumulates as torchmetrics does: tensors in attributes, changed in place, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.total, self.count, self.values = torch.zeros(()), 0, []

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.count += len(values)
        self.values.append(values)


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.mean = nn.Linear(1, 1), nn.BatchNorm1d(1), Mean()
        nn.init.constant_(self.layer.weight, 2.0)
        nn.init.constant_(self.layer.bias, 1.0)
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(self.layer(batch.reshape(-1, 1))).mean()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.mean.update(batch)
        self.seen += [(dataloader_idx, x) for x in batch.tolist()]
        self.norm.train()(self.layer(batch.reshape(-1, 1)).expand(-1, 1).repeat(2, 1))  # moves its statistics
        self.log("mean", batch.mean(), on_epoch=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"y": self.layer(batch.reshape(-1, 1)).reshape(-1), "loader": dataloader_idx}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def everything(strategy: str, folder: str) -> dict[str, Any]:
    """Two loaders, of 5 samples in batches of 2 and of 1 sample, through all entry points."""
    two = [scalar.loader(5, 2), scalar.loader([7.0])]
    found: dict[str, Any] = {}
    for entry in ("validate", "test", "predict"):
        module, trainer = Net(), scalar.trainer(strategy=strategy, callbacks=[PredictionWriter("batch", folder)])
        found[entry] = getattr(trainer, entry)(module, two if entry != "test" else two[0])
        found[f"{entry} seen"] = list(module.seen)
        found[f"{entry} state"] = module.mean.total.item(), module.mean.count, len(module.mean.values)
        found[f"{entry} buffers"] = int(module.norm.num_batches_tracked)
    trainer = scalar.trainer(strategy=strategy)
    trainer.fit(Net(), scalar.loader(8, 2), two)
    found["fit"] = trainer.callback_metrics
    return found


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    made = {2: Pool(2), 4: Pool(4)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(("strategy", "world_size"), CELLS)
def test_each_sample_once(strategy: str, world_size: int, pools: dict[int, Pool], tmp_path: Path) -> None:
    if world_size == 1:
        ranks = [everything(strategy, str(tmp_path))]
    else:
        ranks = pools[world_size].run(everything, strategy, str(tmp_path), timeout_s=120)
    five, one = [(0, float(x)) for x in range(5)], [(1, 7.0)]
    for found in ranks:
        metrics = [{"mean/dataloader_idx_0": 2.0}, {"mean/dataloader_idx_1": 7.0}]
        assert found["validate"] == metrics
        assert found["fit"] == metrics[0] | metrics[1]
        assert found["test"] == [{"mean": 2.0}]
        first, second = found["predict"]
        assert [x["y"].tolist() for x in first] == [[1.0, 3.0], [5.0, 7.0], [9.0]]
        assert [x["y"].tolist() for x in second] == [[15.0]]
        assert {x["loader"] for x in second} == {1}
    for entry, right in (("validate", five + one), ("test", five)):
        assert sorted(x for found in ranks for x in found[f"{entry} seen"]) == right
        for found in ranks:  # a rank that only takes part keeps nothing of it
            mine = [x for _, x in found[f"{entry} seen"]]
            batches = found[f"{entry} state"][2]
            assert found[f"{entry} state"][:2] == (sum(mine), len(mine))
            assert found[f"{entry} buffers"] == batches
    written = list(PredictionWriter.read(tmp_path))
    assert [x["indices"] for x in written] == [[0, 1], [2, 3], [4], [0]]
    assert [x["prediction"]["y"].tolist() for x in written] == [[1.0, 3.0], [5.0, 7.0], [9.0], [15.0]]


# ------------------------------------------------------------------------------------------------------ in one process


def test_predict_calls_forward_where_nothing_else_is_said():
    class Forward(scalar.Scalar):
        def forward(self, batch):
            return batch + 1

    trainer = scalar.trainer()
    assert [x.tolist() for x in trainer.predict(Forward(), scalar.loader(3, 2))] == [[1.0, 2.0], [3.0]]
    assert trainer.predict(Forward(), scalar.loader(3, 2), return_predictions=False) is None


def test_nothing_is_kept_that_is_not_returned():
    kept = []

    class Looks(scalar.Scalar):
        def predict_step(self, batch, batch_idx):
            return batch

        def on_predict_epoch_end(self):
            kept.append(self.trainer.own_predictions)

    scalar.trainer().predict(Looks(), scalar.loader(3), return_predictions=False)
    scalar.trainer(callbacks=[Ends("epoch")]).predict(Looks(), scalar.loader(3), return_predictions=False)
    assert kept[0] == []
    assert [[index for index, *_ in loader] for loader in kept[1]] == [[0, 1, 2]]


class Ends(PredictionWriter):
    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.written = [x.tolist() for x in predictions], batch_indices


def test_a_writer_at_the_end():
    class Doubles(scalar.Scalar):
        def predict_step(self, batch, batch_idx):
            return 2 * batch

    writer = Ends("epoch")
    scalar.trainer(callbacks=[writer]).predict(Doubles(), scalar.loader(3, 2), return_predictions=False)
    assert writer.written == ([[0.0, 2.0], [4.0]], [[[0, 1], [2]]])
    with pytest.raises(ConfigurationError, match="write_interval='never': allowed are 'batch', 'epoch'"):
        PredictionWriter("never")
    with pytest.raises(ConfigurationError, match="PredictionWriter has no output_dir and does not override"):
        scalar.trainer(callbacks=[PredictionWriter()]).predict(Doubles(), scalar.loader(1))


def test_logging_belongs_to_no_prediction():
    class Logs(scalar.Scalar):
        def predict_step(self, batch, batch_idx):
            self.log("x", 1.0)

    with pytest.raises(ConfigurationError, match="log"):
        scalar.trainer().predict(Logs(), scalar.loader(1))


def test_without_a_module_it_is_the_last_one_with_its_best_weights(tmp_path):
    class Falls(scalar.Scalar):
        def test_step(self, batch, batch_idx):
            self.log("w", self.w, on_epoch=True)

        def validation_step(self, batch, batch_idx):
            self.log("worse", self.w.abs(), on_epoch=True)

    best = trivet.Checkpoint(tmp_path, monitor="worse")
    trainer = scalar.trainer(max_epochs=2, callbacks=[best], enable_checkpointing=True)
    module = Falls()
    trainer.fit(module, scalar.loader([1.0]), scalar.loader(1))
    assert trainer.test(dataloaders=scalar.loader(1)) == [{"w": -1.0}]  # of the first epoch, w = -2 came after
    with pytest.raises(ConfigurationError, match="this Trainer has no module yet"):
        scalar.trainer().test(dataloaders=scalar.loader(1))


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_several_loaders_need_a_parameter_for_their_number(entry):
    step = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[entry]
    module = type("Short", (scalar.Scalar,), {step: lambda self, batch, batch_idx: None})()
    with pytest.raises(ConfigurationError, match=rf"Short\.{step} gets batches of several loaders, but has no param"):
        getattr(scalar.trainer(), entry)(module, [scalar.loader(1), scalar.loader(1)])


def test_a_step_may_leave_the_number_of_the_batch_out():
    class Short(scalar.Scalar):
        def training_step(self, batch):
            return super().training_step(batch, 0)

        def validation_step(self, batch):
            self.log("x", batch.mean(), on_epoch=True)

    trainer = scalar.trainer()
    trainer.fit(Short(), scalar.loader([3.0]), scalar.loader([5.0]))
    assert trainer.callback_metrics == {"x": 5.0}


def test_inference_mode_only_where_nothing_is_trained_after():
    seen = {}

    class Looks(scalar.Scalar):
        def validation_step(self, batch, batch_idx):
            seen[self.trainer.stage, self.trainer.inference_mode] = torch.is_inference_mode_enabled()

        def predict_step(self, batch, batch_idx):
            self.validation_step(batch, batch_idx)

    for wanted in (True, False):
        trainer = scalar.trainer(inference_mode=wanted)
        trainer.fit(Looks(), scalar.loader(1), scalar.loader(1))
        trainer.validate(Looks(), scalar.loader(1))
        trainer.predict(Looks(), scalar.loader(1))
    assert seen == {
        ("validate", True): True, ("validate", False): False, ("predict", True): True, ("predict", False): False,
    }  # fmt: skip


def test_limits():
    trainer = scalar.trainer(limit_test_batches=2, limit_predict_batches=0.5)
    assert len(trainer.predict(Net(), scalar.loader(4))) == 2
    assert trainer.test(Net(), scalar.loader(4)) == [{"mean": 0.5}]


def test_the_metrics_are_printed_when_asked_for(capsys):
    scalar.trainer().test(Net(), DataLoader(scalar.Numbers(3), 2), verbose=True)
    assert capsys.readouterr().out == "test 0: mean 1\n"
