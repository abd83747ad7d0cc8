"""C01: the last window of an epoch is short, and batches, ranks and windows are weighted by the samples they hold."""

import pytest
import scalar
from ranks import run


def expected(values, per_update):
    """w after each update of a plain loop over whole global batches."""
    w, history = 0.0, []
    for start in range(0, len(values), per_update):
        window = values[start : start + per_update]
        w -= sum(window) / len(window)
        history.append(w)
    return history


def train(values, batch_size, accumulate, manual):
    module = scalar.Scalar(manual=manual)
    trainer = scalar.trainer(accumulate_grad_batches=accumulate, precision="fp64")
    trainer.fit(module, scalar.loader(values, batch_size))
    return module.history, trainer.progress.update, trainer.progress.samples


def test_three_batches_in_windows_of_two():
    module = scalar.Scalar()
    trainer = scalar.trainer(accumulate_grad_batches=2)
    trainer.fit(module, scalar.loader([1, 1, 1]))
    assert module.w.item() == -2.0
    assert trainer.progress.update == 2


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("samples", "batch_size", "accumulate"),
    [
        (5, 2, 3),  # 2, 2, 1 samples in one window
        (5, 2, 2),  # a window of one batch, which is short too
        (7, 3, 1),  # no accumulation: with two ranks the second update has one batch
        (9, 2, 4),
        (3, 1, 5),  # a window that never fills
        (1, 4, 2),  # one sample in all: with two ranks one of them has no work
    ],
)
def test_each_update_is_the_mean_over_its_samples(samples, batch_size, accumulate, world_size, manual):
    values = [float(i * i + 1) for i in range(samples)]
    right = expected(values, batch_size * accumulate * world_size)
    for history, updates, seen in run(world_size, train, values, batch_size, accumulate, manual):
        assert history == pytest.approx(right, abs=1e-12)
        assert updates == len(right)
        assert seen == samples


def test_windows_begin_anew_in_each_epoch():
    module = scalar.Scalar()
    trainer = scalar.trainer(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(module, scalar.loader([1, 1, 1]))
    assert module.history == [-1.0, -2.0, -3.0, -4.0]
