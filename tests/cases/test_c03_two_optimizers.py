"""C03: two optimizers under manual optimization; an update counts once however many of them step."""

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import nn


class Pair(trivet.Module):
    """Generator and discriminator, each a number; the first may step more rarely than the second."""

    def __init__(self, every=1):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(1, 1, bias=False)
        self.discriminator = nn.Linear(1, 1, bias=False)
        for part in (self.generator, self.discriminator):
            nn.init.zeros_(part.weight)
        self.every, self.steps, self.batches = every, [0, 0], []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch_idx)
        generator, discriminator = self.optimizers()
        for number, (optimizer, part) in enumerate(((discriminator, self.discriminator), (generator, self.generator))):
            if number == 1 and batch_idx % self.every:
                continue
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = part(batch.view(-1, 1)).mean()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.steps[number] += 1
        self.log("loss", loss)

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.generator, self.discriminator)]


def train(every, values, **options):
    module, logger = Pair(every), scalar.Memory()
    trainer = scalar.trainer(logger=logger, log_every_n_steps=1, **options)
    trainer.fit(module, scalar.loader(values))
    return {
        "batches": len(module.batches),
        "steps": module.steps,
        "update": trainer.progress.update,
        "axis": [step for step, _ in logger.column("loss")],
        "weights": (module.discriminator.weight.item(), module.generator.weight.item()),
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("per_epoch", [10, 3])
def test_six_steps_are_six_batches(world_size, per_epoch):
    for rank, seen in enumerate(run(world_size, lambda n: train(1, [1.0] * n, max_steps=6), per_epoch * world_size)):
        assert seen["batches"] == seen["update"] == 6
        assert seen["steps"] == [6, 6]
        assert seen["weights"] == (-6.0, -6.0)
        assert seen["axis"] == ([1, 2, 3, 4, 5, 6] if rank == 0 else [])
        assert seen["frozen"] == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_optimizer_steps_more_rarely(world_size):
    for seen in run(world_size, lambda n: train(2, [1.0] * n), 6 * world_size):
        assert seen["update"] == seen["batches"] == 6
        assert seen["steps"] == [6, 3]
        assert seen["weights"] == (-6.0, -3.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_both_accumulate(world_size):
    """Two micro-batches an update: each optimizer really steps once per update, with the mean gradient."""
    function = lambda n: train(1, [float(i) for i in range(n)], accumulate_grad_batches=2)  # noqa: E731
    for seen in run(world_size, function, 6 * world_size):
        assert seen["update"] == 3
        total = -sum(range(6 * world_size)) / (2 * world_size)
        assert seen["weights"] == (total, total)
