"""What `log` records: weights, reductions, state, and names that differ among ranks."""

import math

import pytest
import scalar
import torch
import trivet
from ranks import on_two_ranks, run
from torch import nn
from torch.utils.data import DataLoader
from trivet.errors import ConfigurationError
from trivet.launch.group import Group
from trivet.launch.world import World
from trivet.metrics import FOLD_EVERY, STEP, Metrics


def metrics(rank=0, world_size=1):
    return Metrics("training", Group(World(rank, world_size), None, torch.device("cpu")))


def log(to, name, value, *, weight=1.0, reduce_fx="mean", on_step=None, on_epoch=True):
    to.defaults, to.weight = STEP, weight
    to.log(name, value, (False, True, on_step, on_epoch, reduce_fx, None, False), None, True, None)


class Logging(scalar.Scalar):
    """Logs what a function says, in training and validation."""

    def __init__(self, train=None, val=None):
        super().__init__()
        self.train_log, self.val_log = train, val

    def training_step(self, batch, batch_idx):
        if self.train_log is not None:
            self.train_log(self, batch, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.val_log is not None:
            self.val_log(self, batch, batch_idx)


def fit(train=None, val=None, *, samples=5, batch_size=2, val_loaders=None, **options):
    module, logger = Logging(train, val), scalar.Memory()
    trainer = scalar.trainer(logger=logger, **options)
    if val is not None and val_loaders is None:
        val_loaders = scalar.loader(samples, batch_size)
    trainer.fit(module, scalar.loader(samples, batch_size), val_loaders)
    return trainer.callback_metrics, logger


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epochs_value_is_reduced_over_the_samples_of_all_ranks(world_size):
    """Samples 0..4 in batches of 2: a mean of means would be 2.17."""

    def one(module, batch, batch_idx):
        for fx in ("mean", "sum", "min", "max"):
            module.log(f"{module.trainer.validating}/{fx}", batch.mean(), on_step=False, on_epoch=True, reduce_fx=fx)
        module.log("weighted", batch.mean(), on_step=False, on_epoch=True, batch_size=1)

    for found, _ in run(world_size, lambda: fit(one, one)):
        for stage in ("True", "False"):
            assert found[f"{stage}/mean"] == 2.0
            assert found[f"{stage}/min"] == 0.5
            assert found[f"{stage}/max"] == 4.0
            if stage == "True" or world_size == 1:  # in training a short window of batches is cut evenly
                assert found[f"{stage}/sum"] == 7.0
        if world_size == 1:
            assert found["weighted"] == 7.0 / 3


def test_a_step_and_an_epoch_value_have_names_of_their_own():
    found, logger = fit(
        lambda module, batch, _: module.log_dict({"a": batch.mean(), "b": 1}, on_step=True, on_epoch=True),
        log_every_n_steps=1,
    )
    assert found == {"a": 2.0, "b": 1.0, "a_step": 4.0, "b_step": 1.0, "a_epoch": 2.0, "b_epoch": 1.0}
    assert logger.column("a_step") == [(1, 0.5), (2, 2.5), (3, 4.0)]
    assert logger.column("a_epoch") == [(3, 2.0)]


def test_what_the_logger_and_the_bar_shall_not_see():
    bars = []

    def one(module, batch, _):
        module.log("hidden", 1.0, logger=False)
        module.log("bar", 2.0, prog_bar=True)
        bars.append(module.trainer.progress_bar_metrics)

    found, logger = fit(one, log_every_n_steps=1)
    assert found["hidden"] == 1.0
    assert logger.column("hidden") == []
    assert bars[-1] == {"bar": 2.0}


@pytest.mark.parametrize("where", ["on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end"])
def test_hooks_of_the_epoch_log_for_the_epoch(where):
    class Hooked(Logging):
        pass

    setattr(Hooked, where, lambda self: self.log("x", 3.0))
    trainer = scalar.trainer()
    trainer.fit(Hooked(val=lambda *_: None), scalar.loader(2), scalar.loader(2))
    assert trainer.callback_metrics["x"] == 3.0


def test_several_validation_loaders_have_names_of_their_own():
    found, _ = fit(
        val=lambda module, batch, _: module.log("val", batch.mean()),
        val_loaders=[scalar.loader([1.0]), scalar.loader([5.0])],
    )
    assert found == {"val/dataloader_idx_0": 1.0, "val/dataloader_idx_1": 5.0}
    trainer = scalar.trainer()
    module = Logging(val=lambda module, batch, _: module.log("val", batch.mean()))
    apart = trainer.validate(module, [scalar.loader([1.0]), scalar.loader([5.0])])
    assert apart == [{"val/dataloader_idx_0": 1.0}, {"val/dataloader_idx_1": 5.0}]


def test_the_weight_of_a_batch_is_not_guessed_from_its_tensors():
    """C22: batches of 4 and 1 samples, each sample a tensor of 5 and a number."""

    class Listed(Logging):
        def training_step(self, batch, batch_idx):
            x, y = batch
            self.log("mean", y.mean(), on_step=False, on_epoch=True)
            return self.w * x[0].mean()

    data = [([torch.ones(5)] * 2, float(i)) for i in (1, 2, 3, 4, 7)]
    trainer = scalar.trainer()
    trainer.fit(Listed(), DataLoader(data, 4))
    assert trainer.callback_metrics["mean"] == pytest.approx(3.4)


def test_c22_a_size_that_is_not_known_is_told_of():
    """The same batches as a plain list: they count alike, which is said, unless the user says their sizes."""

    class Sized(Logging):
        def training_step(self, batch, batch_idx):
            self.log("mean", batch[1].mean(), on_epoch=True, batch_size=len(batch[1]) if self.train_log else None)
            return self.w * batch[0][0].mean()

    batches = [([torch.ones(n, 5)], torch.tensor(values)) for n, values in ((4, [1.0, 2.0, 3.0, 4.0]), (1, [7.0]))]
    trainer = scalar.trainer()
    with pytest.warns(
        UserWarning, match=r"all batches count alike in the mean of 'mean'\. Give log\(\.\.\., batch_size"
    ):
        trainer.fit(Sized(), batches)
    assert trainer.callback_metrics["mean"] == 4.75
    trainer.fit(Sized(train=True), batches)
    assert trainer.callback_metrics["mean"] == pytest.approx(3.4)


# what is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.log("x", torch.ones(2)), r"log\('x'\) got a tensor of shape \(2,\); a metric is one number"),
        (lambda m: m.log("x", "high"), r"log\('x'\) got 'high'; expected a number, a 0-dim tensor"),
        (lambda m: m.log("x", 1, reduce_fx="median"), r"reduce_fx='median'\): allowed are mean, sum, min, max"),
        (lambda m: m.log("x", 1, on_step=False, on_epoch=False), "would record nothing"),
    ],
)
def test_what_cannot_be_logged(call, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(lambda module, *_: call(module))


def test_logging_outside_a_run_says_so():
    with pytest.raises(ConfigurationError, match="Scalar is not in a run: this works only in methods that"):
        scalar.Scalar().log("x", 1)


def test_a_parameter_that_is_logged_is_not_overwritten_by_later_updates():
    found, _ = fit(
        lambda module, *_: module.log("w", module.w, on_step=False, on_epoch=True, reduce_fx="max"), samples=[1.0, 1.0]
    )
    assert found["w"] == 0.0


# state


def test_state_is_exact_to_the_bit_wherever_it_is_taken():
    values = torch.randn(3 * FOLD_EVERY + 7, generator=torch.Generator().manual_seed(0)).tolist()
    for cut in (0, 1, FOLD_EVERY - 1, FOLD_EVERY, FOLD_EVERY + 1, len(values)):
        whole, first, second = metrics(), metrics(), metrics()
        for fx in ("mean", "sum", "min", "max"):
            for i, value in enumerate(values):
                log(whole, fx, value, weight=i % 3 + 1, reduce_fx=fx)
                if i < cut:
                    log(first, fx, value, weight=i % 3 + 1, reduce_fx=fx)
        state = first.state_dict()
        second.load_state_dict(state)
        for fx in ("mean", "sum", "min", "max"):
            for i, value in enumerate(values[cut:], cut):
                log(second, fx, torch.tensor(value, dtype=torch.float64), weight=i % 3 + 1, reduce_fx=fx)
        assert second.epoch_row() == whole.epoch_row()
        assert first.state_dict() == state  # taking it changed nothing


def test_state_keeps_infinity_and_nan():
    one, other = metrics(), metrics()
    for name, value in (("inf", math.inf), ("nan", math.nan)):
        log(one, name, value, on_step=False)
    other.load_state_dict(one.state_dict())
    row = other.epoch_row()
    assert row["inf"] == math.inf
    assert math.isnan(row["nan"])


def test_shares_of_more_ranks_are_joined():
    shares = []
    for rank in range(3):
        one = metrics()
        for fx in ("mean", "sum", "min", "max"):
            log(one, fx, float(rank), weight=rank + 1, reduce_fx=fx, on_step=False)
        shares += one.state_dict()["ranks"]
    joined = metrics()
    joined.load_state_dict({"ranks": shares})
    assert joined.epoch_row() == {"mean": (0 * 1 + 1 * 2 + 2 * 3) / 6, "sum": 3.0, "min": 0.0, "max": 2.0}
    last = metrics(rank=4, world_size=5)
    last.load_state_dict({"ranks": shares})
    assert not any(last.slots.values())


def test_memory_does_not_grow_with_the_epoch():
    one = metrics()
    for i in range(10 * FOLD_EVERY):
        log(one, "x", float(i), on_step=False)
    assert len(one.slots[STEP]["x"].pending) < FOLD_EVERY


def test_nothing_is_logged_where_logging_is_off():
    one = metrics()
    one.muted = True
    log(one, "x", 1.0)
    assert not any(one.slots.values())


# several ranks


class TwoNames(trivet.Module):
    """C21: rank 0 logs "a" = 10, rank 1 logs "b" = 20."""

    def __init__(self, **options):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.options = options

    def training_step(self, batch, batch_idx):
        name, value = (("a", 10.0), ("b", 20.0))[self.global_rank]
        self.log(name, value, **self.options)
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_two_names(options):
    trainer = scalar.trainer(log_every_n_steps=1)
    trainer.fit(TwoNames(**options), DataLoader(torch.ones(4, 1), 1))
    return trainer.callback_metrics


def test_a_step_that_is_not_reduced_belongs_to_its_rank():
    assert on_two_ranks(fit_two_names, {}) == [{"a": 10.0}, {"b": 20.0}]
