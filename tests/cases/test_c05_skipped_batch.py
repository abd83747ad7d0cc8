"""C05: a batch that cannot be used on one rank is skipped, on all ranks or in its own samples alone, as declared."""

import math

import pytest
import scalar
import torch
from ranks import outcomes, run
from trivet.errors import TrivetError

NAN = float("nan")


class Picky(scalar.Scalar):
    """Returns None for a batch whose loss is NaN."""

    def training_step(self, batch, batch_idx):
        if batch.isnan().any():
            return None
        return super().training_step(batch, batch_idx)


def train(values, batch_size, **options):
    module = Picky()
    logger = scalar.Memory()
    trainer = scalar.trainer(precision="fp64", logger=logger, log_every_n_steps=1, **options)
    trainer.fit(module, scalar.loader(values, batch_size))
    return {
        "history": module.history,
        "w": module.w.item(),
        "update": trainer.progress.update,
        "skipped": trainer.progress.skipped,
        "grad": module.w.grad is None or bool(module.w.grad.isfinite()),
    }


def expected(values, batch_size, per_update, policy):
    """A plain loop in one process. A batch with a NaN in it is bad as a whole."""
    w, history, skipped = 0.0, [], 0
    batches = [values[i : i + batch_size] for i in range(0, len(values), batch_size)]
    for start in range(0, len(batches), per_update):
        window = batches[start : start + per_update]
        good = [x for batch in window for x in batch if not any(map(math.isnan, batch))]
        if good and (policy == "samples" or len(good) == sum(map(len, window))):
            w -= sum(good) / len(good)
        else:
            skipped += 1
        history.append(w)
    return history, skipped


CASES = {
    "one bad batch": ([1.0, 2.0, 3.0, NAN, 5.0, 6.0, 7.0, 8.0], 1, 1),
    "all of an update": ([1.0, 2.0, NAN, NAN, 5.0, 6.0], 1, 1),
    "the first update": ([NAN, 2.0, 3.0, 4.0], 1, 1),
    "unequal sizes": ([1.0, 2.0, 3.0, NAN, 5.0], 2, 1),
    "accumulated": ([1.0, NAN, 3.0, 4.0, 5.0, 6.0, NAN, 8.0], 1, 2),
    "accumulated and short": ([1.0, 2.0, NAN, 4.0, 5.0, 6.0, 7.0], 2, 2),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("policy", ["update", "samples"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_left_counts_as_declared(case, policy, world_size):
    values, batch_size, accumulate = CASES[case]
    history, skipped = expected(values, batch_size, accumulate * world_size, policy)
    function = lambda: train(values, batch_size, on_skip=policy, accumulate_grad_batches=accumulate)  # noqa: E731
    found = run(world_size, function)
    for seen in found:
        assert seen["history"] == pytest.approx(history, abs=1e-12)
        assert (seen["update"], seen["skipped"]) == (len(history) - skipped, skipped)
        assert seen["grad"]
    assert found[0]["w"] == found[-1]["w"]  # to the bit


def test_with_one_process_nothing_needs_to_be_declared():
    values = [1.0, NAN, 3.0]
    seen = train(values, 1)
    assert seen["history"] == [-1.0, -1.0, -4.0]
    assert (seen["update"], seen["skipped"]) == (2, 1)


def test_undeclared_on_two_ranks_is_an_error_that_names_rank_and_batch():
    first, second = outcomes(lambda: train([1.0, 2.0, 3.0, NAN, 5.0, 6.0], 1))
    assert isinstance(second, TrivetError)
    assert "returned None on rank 1 for batch 1" in str(second)
    assert 'on_skip="update"' in str(second)
    assert 'on_skip="samples"' in str(second)
    assert isinstance(first, TrivetError)
    assert "rank 1 failed with TrivetError" in str(first)


def test_the_schedule_stands_still_for_a_skipped_update():
    class Scheduled(Picky):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "update"}}

    module = Scheduled()
    scalar.trainer().fit(module, scalar.loader([NAN, 1.0, 1.0]))
    assert module.history == [0.0, -1.0, -1.5]
