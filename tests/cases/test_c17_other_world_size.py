"""C17: a run that goes on with another number of processes is the run that never stopped, to rounding."""

from pathlib import Path

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.checkpoint import directory
from trivet.layout import whole

SAVED_AT, UPDATES, SAMPLES = 3, 6, 22


class Net(trivet.Module):
    """Adam over a 5 x 3 layer, a scalar, and a layer of one row, which cannot be shared out evenly."""

    def __init__(self, path):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.scale = nn.Parameter(torch.ones(()))
        self.path, self.samples, self.weights = path, {}, {}

    def training_step(self, batch, batch_idx):
        index, x = batch
        self.samples.setdefault(self.trainer.progress.update, []).extend(index.tolist())
        return (self.scale * self.layers(x) - x.sum(1, keepdim=True)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def on_train_start(self):
        self.keep()

    def keep(self):
        held = self.trainer.strategy.state_dict(self)
        self.weights[self.trainer.progress.update] = {name: whole(t.detach()).clone() for name, t in held.items()}

    def on_update_end(self):
        self.keep()
        update = self.trainer.progress.update
        if self.path is not None and update in (SAVED_AT, UPDATES):
            self.trainer.save_checkpoint(f"{self.path}-{update}")


def train(strategy, world_size, path, origin=None, batch_size=4):
    """Task: an uninterrupted run of 6 updates, over the end of an epoch; or what is left of one after the third."""
    module = Net(path)
    torch.manual_seed(8 if origin is None else 99)
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES), x), batch_size, shuffle=True)
    trainer = scalar.trainer(strategy=strategy, devices=world_size, max_steps=UPDATES)
    trainer.fit(module, loader, ckpt_path=origin)
    return module.weights, module.samples, trainer.progress.to_dict()


def gathered(path):
    """Weights and moments by name, read from a checkpoint without a process group."""
    state = directory.read(path)
    (optimizer,) = state.optimizers
    moments = {f"{n} {key}": v[key] for n, v in optimizer["state"].items() for key in ("exp_avg", "exp_avg_sq")}
    assert len(moments) == 2 * 5
    return {**state.module, **moments}


def near(found, expected, what):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6, msg=lambda text: f"{what}: {text}")


def of_all(ranks, update):
    return sorted(index for _, samples, _ in ranks for index in samples[update])


@pytest.mark.parametrize("batch_size", [4, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero2", "zero3"])
def test_the_run_goes_on_with_another_number(strategy, before, after, batch_size, tmp_path):
    """Two processes that took a batch each go on as one that takes two; of one batch each of two takes a half."""
    unbroken = run(before, train, strategy, before, tmp_path / "whole", None, batch_size)
    origin = Path(f"{tmp_path / 'whole'}-{SAVED_AT}")
    resumed = run(after, train, strategy, after, tmp_path / "rest", origin, batch_size)
    expected = unbroken[0][0]
    for weights, _, progress in resumed:
        for name, value in expected[SAVED_AT].items():
            assert torch.equal(weights[SAVED_AT][name], value), f"{name} as it was read"
        for update in range(SAVED_AT + 1, UPDATES + 1):
            for name, value in expected[update].items():
                near(weights[update][name], value, f"{name} after update {update}")
        assert progress["samples"] == unbroken[0][2]["samples"]
    for update in range(SAVED_AT, UPDATES):
        assert of_all(resumed, update) == of_all(unbroken, update)
    one, other = (gathered(f"{tmp_path / name}-{UPDATES}") for name in ("whole", "rest"))
    assert one.keys() == other.keys()
    for name, value in one.items():
        near(other[name], value, name)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_the_moments_that_are_stored_are_those_of_one_process(strategy, tmp_path):
    """Gathered, by name: the same data in the same updates, on one process and on two."""
    run(1, train, strategy, 1, tmp_path / "one", None, 8)
    run(2, train, strategy, 2, tmp_path / "two", None, 4)
    one, two = (gathered(f"{tmp_path / name}-{SAVED_AT}") for name in ("one", "two"))
    for name, value in one.items():
        near(two[name], value, name)
