"""The guard `trivet.rank_zero`: what it lets through, and the collectives that it refuses."""

import pytest
import torch
import trivet
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from trivet.errors import CollectiveError
from trivet.launch import alone


class Net(trivet.Module):
    def __init__(self, what):
        super().__init__()
        self.layer, self.what = torch.nn.Linear(1, 1), what

    def training_step(self, batch, batch_idx):
        self.report()
        return self.layer(batch).mean()

    @trivet.rank_zero
    def report(self):
        self.what(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(what):
    trainer = trivet.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Net(what), DataLoader(torch.ones(4, 1), 2))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        (lambda net: net.all_gather(torch.ones(1)), r"all_gather\(\) inside trivet.rank_zero"),
        (lambda net: net.log("a", 1.0, sync_dist=True), r"log\('a'\), a value .* rank_zero_only=True"),
        (lambda net: net.log("a", 1.0, on_epoch=True), r"log\('a'\)"),
        (lambda net: net.log_dict({"a": 1.0}, on_epoch=True), r"log\('a'\)"),
        (lambda net: net.log_dict(MetricCollection([MeanMetric()]), on_epoch=True), r"log\('MeanMetric'\)"),
        (lambda net: net.trainer.save_checkpoint("nowhere"), r"save_checkpoint\('nowhere'\)"),
        (lambda net: net.trainer.save_checkpoint_async("nowhere"), r"save_checkpoint_async\('nowhere'\)"),
        (lambda net: net.trainer.agree(True), r"agree\(\)"),
        (lambda net: net.trainer.full_parameters(), r"full_parameters\(\)"),
    ],
)
def test_collectives_inside_are_refused_where_they_are_called(what, named):
    with pytest.raises(CollectiveError, match=named) as caught:
        fit(what)
    assert any(entry.name == "report" for entry in caught.traceback)
    assert not alone.inside  # whatever was raised in it, the guard is left


def test_what_is_rank_zeros_own_is_not():
    def own(net):
        net.log("a", 1.0)  # on steps alone, where each rank has its own
        net.log("b", 1.0, on_epoch=True, rank_zero_only=True)
        net.log("c", 1.0, on_epoch=True, sync_dist="sparse")

    fit(own)


def test_decorated_functions_run_on_rank_zero_alone(monkeypatch):
    double = trivet.rank_zero(lambda number: 2 * number)
    assert double(3) == 6
    monkeypatch.setenv("TRIVET_ENVIRONMENT", "none")  # told that RANK is nobody's
    monkeypatch.setenv("RANK", "1")
    assert double(3) == 6
    monkeypatch.delenv("TRIVET_ENVIRONMENT")
    monkeypatch.setenv("TRIVET_LAUNCH_DIR", "somewhere")
    monkeypatch.setenv("RANK", "1")
    assert double(3) is None
    with trivet.rank_zero as here:
        assert not here
        with trivet.rank_zero:
            pass
        assert alone.inside
    assert not alone.inside
