"""C06: an update that overflowed in fp16 moves neither the weights, nor the schedule, nor the counter."""

import pytest
import scalar
import torch
from ranks import run

INF = float("inf")


class Scheduled(scalar.Scalar):
    """The learning rate halves with every update; under manual optimization the module does that itself."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "update"}}


def train(values, manual=False, interval=2000, **options):
    module, logger = Scheduled(manual=manual), scalar.Memory()
    precision = {"name": "fp16-mixed", "interval": interval}
    trainer = scalar.trainer(precision=precision, logger=logger, log_every_n_steps=1, **options)
    rates, scales = [], []
    module.on_update_end = lambda: (
        module.history.append(module.w.item()),
        rates.append(trainer.optimizers[0].param_groups[0]["lr"]),
        scales.append(module._run.engine.scaler.scale),
    )
    trainer.fit(module, scalar.loader(values))
    return {
        "history": module.history,
        "rates": rates,
        "scales": scales,
        "update": trainer.progress.update,
        "skipped": trainer.progress.skipped,
        "logged": trainer.callback_metrics.get("skipped"),
        "rows": [value for _, value in logger.column("skipped")],
        "grad": module.w.grad is None or bool(module.w.grad.isfinite()),
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_update_overflows(world_size):
    """With two ranks it overflows on rank 1 alone, and rank 0 agrees."""
    values = {1: [INF, 1.0, 1.0], 2: [1.0, INF, 1.0, 1.0, 1.0, 1.0]}[world_size]
    for rank, seen in enumerate(run(world_size, train, values)):
        assert seen["history"] == [0.0, -1.0, -1.5]
        assert seen["rates"] == [1.0, 0.5, 0.25]
        assert seen["scales"] == [32768.0] * 3
        assert (seen["update"], seen["skipped"]) == (2, 1)
        assert seen["logged"] == 1
        assert seen["rows"] or rank
        assert seen["grad"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_manual_optimization_keeps_the_same_order(world_size):
    values = {1: [INF, 1.0, 1.0], 2: [1.0, INF, 1.0, 1.0, 1.0, 1.0]}[world_size]
    for seen in run(world_size, lambda: train(values, manual=True)):
        assert seen["history"] == [0.0, -1.0, -2.0]  # the module steps its own schedules, and this one does not
        assert (seen["update"], seen["skipped"]) == (2, 1)
        assert seen["scales"] == [32768.0] * 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_bad_micro_batch_skips_its_whole_window(world_size):
    values = [1.0, 1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0] * world_size
    for seen in run(world_size, lambda: train(values, accumulate_grad_batches=2)):
        assert seen["skipped"] == world_size
        assert seen["update"] == 4 - world_size if world_size == 1 else seen["update"] == 2
        assert seen["grad"]


def test_the_scale_grows_after_enough_good_updates():
    seen = train([1.0, 1.0, INF, 1.0, 1.0], interval=2)
    assert seen["scales"] == [65536.0, 131072.0, 65536.0, 65536.0, 131072.0]
    assert seen["rates"][-1] == 1 / 16


def test_clipping_sees_unscaled_gradients():
    module = Scheduled()
    trainer = scalar.trainer(precision="fp16", gradient_clip_val=0.5)
    trainer.fit(module, scalar.loader([INF, 4.0, 0.25]))
    # torch divides by the norm plus 1e-6
    assert module.history == pytest.approx([0.0, -0.5, -0.625], abs=1e-6)
    assert trainer.callback_metrics["grad_norm"] == 0.25
