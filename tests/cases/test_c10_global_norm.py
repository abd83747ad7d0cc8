"""C10: gradients are clipped by the norm of the whole model, also where every rank holds a part of it."""

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import nn

STRATEGIES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
CLIP = 0.1


class Net(trivet.Module):
    """Layers of 5 x 3 and 3 x 5, which two ranks cannot share evenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.norms = []

    def training_step(self, batch, batch_idx):
        return (self.layers(batch) - 1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    def on_update_end(self):
        self.norms.append(self.trainer.callback_metrics["grad_norm"])

    def on_train_end(self):
        strategy = self.trainer.strategy
        self.whole = {name: strategy.whole(t).detach().clone() for name, t in strategy.state_dict(self).items()}


def train(strategy, devices):
    module = Net()
    batches = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    options = {"devices": devices, "gradient_clip_val": CLIP, "max_steps": 3, "global_batch_size": 4}
    trainer = scalar.trainer(strategy=strategy, **options)
    trainer.fit(module, torch.utils.data.DataLoader(batches, 4 // devices))
    return module.whole, module.norms


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_clip_as_one_process(strategy):
    expected, norms = train("single", 1)
    assert min(norms) > CLIP
    for weights, found in run(2, train, strategy, 2):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-6)
