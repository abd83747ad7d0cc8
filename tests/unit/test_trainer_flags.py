"""What the Trainer's flags do, and what a wrong value is answered with."""

import time
import warnings
from datetime import timedelta

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch.utils.data import DataLoader, IterableDataset
from trivet.errors import ConfigurationError, DataError, PlanError
from trivet.plugins import Strategy


class Traced(scalar.Scalar):
    def __init__(self):
        super().__init__()
        self.trace = []

    def training_step(self, batch, batch_idx):
        self.trace.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.trace.append(f"v{batch_idx}")
        self.log("val", batch.mean())


def fit(samples=4, val=None, module=None, **options):
    module = module or Traced()
    trainer = scalar.trainer(**options)
    trainer.fit(module, scalar.loader(samples), None if val is None else scalar.loader(val))
    return module.trace, trainer


# limits


def test_max_epochs_and_max_steps():
    assert fit(max_epochs=2)[0] == [0, 1, 2, 3] * 2
    trace, trainer = fit(max_steps=6)
    assert trace == [0, 1, 2, 3, 0, 1]
    assert (trainer.global_step, trainer.current_epoch, trainer.max_epochs, trainer.max_steps) == (6, 1, None, 6)
    assert fit(max_steps=6, max_epochs=1)[0] == [0, 1, 2, 3]
    assert fit(max_steps=0)[0] == []
    assert fit(max_epochs=0)[0] == []


def test_max_steps_counts_updates_and_not_batches():
    trace, trainer = fit(max_steps=3, accumulate_grad_batches=2)
    assert trace == [0, 1, 2, 3, 0, 1]
    assert trainer.global_step == 3


def test_without_any_limit_there_is_a_warning():
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = trivet.Trainer(**quiet)
    assert trainer.max_epochs == 1000
    trainer.validate(Traced(), scalar.loader(1))  # which has no such limit
    with pytest.warns(UserWarning, match="training ends after 1000 epochs"):
        trainer.fit(Stops(), scalar.loader(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trivet.Trainer(accelerator="cpu", logger=False, max_epochs=-1).max_epochs is None


class Stops(Traced):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def test_should_stop_waits_for_the_minimum():
    assert fit(module=Stops())[0] == [0, 1]
    assert fit(module=Stops(), max_epochs=9, min_steps=3)[0] == [0, 1, 2]
    assert fit(module=Stops(), max_epochs=9, min_epochs=2)[0] == [0, 1, 2, 3] * 2


def test_should_stop_on_one_rank_stops_all():
    class OneRank(Traced):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop |= self.global_rank == 1 and batch_idx == 1
            return super().training_step(batch, batch_idx)

    assert [trace for trace, _ in run(2, lambda: (fit(12, module=OneRank(), log_every_n_steps=1)[0], 0))] == [
        [0, 1]
    ] * 2


@pytest.mark.parametrize("limit", [0.3, timedelta(milliseconds=300)])
def test_max_time(limit):
    class Slow(Traced):
        def training_step(self, batch, batch_idx):

            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    trace, trainer = fit(10_000, module=Slow(), max_time=limit)
    assert 0 < len(trace) <= 15
    assert trainer.progress.update == len(trace)
    assert scalar.trainer(max_time="01:02:03:04").limits.max_seconds == 93784


@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (0.5, 5), (1.0, 10), (100, 10)])
def test_limit_train_batches(limit, batches):
    trace, trainer = fit(10, limit_train_batches=limit)
    assert trace == list(range(batches))
    assert trainer.progress.epoch == 1


@pytest.mark.parametrize(("limit", "batches"), [(2, 2), (0.5, 3), (1.0, 6), (0, 0)])
def test_limit_val_batches(limit, batches):
    assert fit(1, val=6, limit_val_batches=limit)[0] == [0, *(f"v{i}" for i in range(batches))]


def test_limits_are_per_rank():
    function = lambda: fit(12, val=8, limit_train_batches=2, limit_val_batches=3)[0]  # noqa: E731
    assert run(2, function) == [[0, 1, "v0", "v2", "v4"], [0, 1, "v1", "v3", "v5"]]


# validation


def test_val_check_interval():
    v = ["v0"]
    assert fit(4, val=1, max_epochs=2)[0] == [0, 1, 2, 3, *v] * 2
    assert fit(4, val=1, val_check_interval=2)[0] == [0, 1, *v, 2, 3, *v]
    assert fit(4, val=1, val_check_interval=0.25)[0] == [0, *v, 1, *v, 2, *v, 3, *v]
    assert fit(5, val=1, val_check_interval=2, max_epochs=2)[0] == [0, 1, *v, 2, 3, *v, 4] * 2
    assert fit(4, val=1, max_epochs=4, check_val_every_n_epoch=2)[0] == [0, 1, 2, 3, 0, 1, 2, 3, *v] * 2
    accumulated = fit(4, val=1, val_check_interval=2, accumulate_grad_batches=2)[0]
    assert accumulated == [0, 1, *v, 2, 3, *v]


def test_sanity_validation_leaves_no_trace():
    seen = []

    class Asks(Traced):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            seen.append((self.trainer.sanity_checking, self.trainer.validating, self.training))

        def on_train_start(self):
            seen.append(dict(self.trainer.callback_metrics))

    trace, trainer = fit(1, val=5, module=Asks(), num_sanity_val_steps=2)
    assert trace == ["v0", "v1", 0, "v0", "v1", "v2", "v3", "v4"]
    assert seen[:3] == [(True, False, False), (True, False, False), {}]
    assert seen[3:] == [(False, True, False)] * 5
    assert trainer.callback_metrics == {"val": 2.0}
    assert fit(1, val=5, num_sanity_val_steps=-1)[0][:6] == ["v0", "v1", "v2", "v3", "v4", 0]


def test_fast_dev_run(tmp_path):
    module, logger = Traced(), scalar.Memory()
    trainer = trivet.Trainer(
        accelerator="cpu", fast_dev_run=True, logger=logger, enable_progress_bar=False, default_root_dir=tmp_path / "x"
    )
    trainer.fit(module, scalar.loader(4), scalar.loader(4))
    assert module.trace == [0, "v0"]
    assert logger.rows == []
    assert not (tmp_path / "x").exists()
    assert fit(9, val=9, fast_dev_run=3, max_epochs=7)[0] == [0, 1, 2, "v0", "v1", "v2"]


def test_log_every_n_steps():
    logger = scalar.Memory()

    class Logs(Traced):
        def training_step(self, batch, batch_idx):
            self.log("x", batch_idx)
            return super().training_step(batch, batch_idx)

    fit(7, module=Logs(), logger=logger, log_every_n_steps=3)
    assert logger.column("x") == [(3, 2.0), (6, 5.0)]
    assert logger.status == "success"


# the size of an update


@pytest.mark.parametrize("world_size", [1, 2])
def test_global_batch_size_sets_the_accumulation(world_size):
    def train():
        module, trainer = scalar.Scalar(), scalar.trainer(global_batch_size=8)
        trainer.fit(module, scalar.loader(16, 2))
        return module.history, trainer.progress.batch, trainer.progress.update

    assert run(world_size, train) == [([-3.5, -15.0], 0, 2)] * world_size


def test_a_global_batch_has_samples():
    for size in (0, -8, 2.5):
        with pytest.raises(ConfigurationError, match=r"global_batch_size=.* expected a whole number from 1 up"):
            scalar.trainer(global_batch_size=size)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (7, r"not a multiple of batch_size 2 x 1 processes = 2\. Possible: multiples of 2, such as 6 or 8"),
        (1, r"Possible: multiples of 2, such as 2, or a loader with batch_size 1"),
    ],
)
def test_an_impossible_global_batch_size_names_the_possible_ones(size, message):
    with pytest.raises(ConfigurationError, match=message):
        scalar.trainer(global_batch_size=size).fit(scalar.Scalar(), scalar.loader(16, 2))


class Whole(Strategy):
    """Takes an update in one piece."""

    @property
    def offers(self):
        return super().offers - {"accumulation"}


class Later(trivet.DataModule):
    def train_dataloader(self):
        return scalar.loader(16, 2)


@pytest.mark.parametrize("later", [False, True], ids=["known before launch", "known from the data module"])
def test_a_strategy_without_accumulation_is_refused_where_the_global_batch_size_asks_for_it(later):
    data = {"datamodule": Later()} if later else {"train_dataloaders": scalar.loader(16, 2)}
    scalar.trainer(strategy=Whole(), global_batch_size=2).fit(scalar.Scalar(), **data)
    with pytest.raises(PlanError) as caught:
        scalar.trainer(strategy=Whole(), global_batch_size=8).fit(scalar.Scalar(), **data)
    (conflict,) = caught.value.conflicts
    assert conflict.parties[0] == "--global_batch_size 8 (4 micro-batches per process)"
    assert "'accumulation'" in conflict.reason
    assert conflict.remedy.startswith("--strategy ")


def test_global_batch_size_needs_a_known_batch_size():
    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.ones(2)

    with pytest.raises(ConfigurationError, match="needs a loader with a known batch_size"):
        scalar.trainer(global_batch_size=8).fit(scalar.Scalar(), DataLoader(Endless(), batch_size=None))


@pytest.mark.parametrize(("algorithm", "w"), [("norm", -0.5), ("value", -0.5)])
def test_gradient_clipping(algorithm, w):
    module = scalar.Scalar()
    trainer = scalar.trainer(gradient_clip_val=0.5, gradient_clip_algorithm=algorithm, precision="fp64")
    trainer.fit(module, scalar.loader([4.0]))
    assert module.w.item() == pytest.approx(w, abs=1e-6)
    assert trainer.callback_metrics == ({"grad_norm": 4.0} if algorithm == "norm" else {})


# wrong values

WRONG = [
    ({"max_epochs": -2}, r"max_epochs=-2: expected a whole number from -1 up"),
    ({"max_steps": 1.5}, r"max_steps=1\.5: expected a whole number from -1 up"),
    ({"min_steps": -1}, r"min_steps=-1: expected a whole number from 0 up"),
    ({"max_time": "1 fortnight"}, r"max_time='1 fortnight': allowed are a number of seconds; '10 min', '2 h'; 'DD:HH"),
    ({"max_time": -1}, r"max_time=-1: expected a positive number of seconds"),
    ({"limit_train_batches": 1.5}, r"limit_train_batches=1\.5: expected a number of batches \(int\) or a fraction"),
    ({"limit_val_batches": -1}, r"limit_val_batches=-1: expected a number of batches"),
    ({"val_check_interval": 0}, r"val_check_interval=0: a number of batches is at least 1"),
    ({"val_check_interval": 1.5}, r"val_check_interval=1\.5: a fraction lies in \(0\.0, 1\.0\]"),
    ({"check_val_every_n_epoch": 0}, r"check_val_every_n_epoch=0: expected a whole number from 1 up"),
    ({"num_sanity_val_steps": -2}, r"num_sanity_val_steps=-2: expected a whole number from -1 up"),
    ({"log_every_n_steps": 0}, r"log_every_n_steps=0: expected a whole number from 1 up"),
    ({"accumulate_grad_batches": 0}, r"accumulate_grad_batches=0: expected a whole number from 1 up"),
    ({"accumulate_grad_batches": 2, "global_batch_size": 8}, r"were both given; the first replaces the second"),
    ({"gradient_clip_val": -1.0}, r"gradient_clip_val=-1\.0: expected a positive number, or None"),
    ({"gradient_clip_algorithm": "max"}, r"gradient_clip_algorithm='max': allowed are 'norm', 'value'"),
    ({"on_skip": "batch"}, r"on_skip='batch': allowed are None, 'update', 'samples'"),
    ({"uneven": "pad"}, r"uneven='pad': allowed are 'error', 'drop', 'join'"),
    ({"callbacks": [3]}, r"callback: expected a trivet\.Callback, a name .* got 3"),
    ({"callbacks": [trivet.Checkpoint()]}, r"Checkpoint callback was given together with enable_checkpointing=False"),
    ({"callbacks": ["timer", "timer"]}, r"two callbacks have the state_key 'Timer'; override"),
    ({"devices": 0}, r"devices=0\. Expected a number of processes"),
    ({"fast_dev_run": -1}, r"fast_dev_run=-1: expected"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_wrong_value_says_what_is_allowed(options, message):
    with pytest.raises(ConfigurationError, match=message):
        scalar.trainer(**options)


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("strategy", "dpp", "ddp"), ("precision", "fp23", "fp32"), ("accelerator", "cdua", "cuda")],
)
def test_an_unknown_plugin_names_the_nearest(name, value, near):
    with pytest.raises(LookupError, match=f"no {name} is named '{value}'. Did you mean '{near}'"):
        scalar.trainer(**{name: value})


def test_single_on_two_devices_is_refused():
    with pytest.raises(PlanError, match="strategy 'single'"):
        scalar.trainer(strategy="single", devices=2)


def test_data_that_does_not_fit_the_flags():
    with pytest.raises(ConfigurationError, match="val_check_interval=9 batches, but an epoch has only 4"):
        fit(4, val=1, val_check_interval=9)
    with pytest.raises(ConfigurationError, match=r"Scalar has no validation_step\(batch, batch_idx\)"):
        scalar.trainer().fit(scalar.Scalar(), scalar.loader(1), scalar.loader(1))
    with pytest.raises(DataError, match="gives no batch"):
        scalar.trainer().fit(scalar.Scalar(), scalar.loader(0))
    with pytest.raises(ConfigurationError, match=r"no training data, and Scalar has no train_dataloader\(\)"):
        scalar.trainer().fit(scalar.Scalar())
    with pytest.raises(ConfigurationError, match=r"expected a trivet\.Module to fit, got Linear"):
        scalar.trainer().fit(torch.nn.Linear(1, 1), scalar.loader(1))
    with pytest.raises(ConfigurationError, match="ckpt_path='last': no Checkpoint callback of this Trainer has saved"):
        scalar.trainer().fit(scalar.Scalar(), scalar.loader(1), ckpt_path="last")


def test_what_is_known_only_during_a_run_says_so():
    with pytest.raises(
        ConfigurationError, match="this is known only while fit, validate, test or predict runs, and after it"
    ):
        scalar.trainer().optimizers  # noqa: B018


def test_data_that_is_given_twice_or_in_the_wrong_place_is_refused() -> None:
    made = trivet.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match="was given a loader and the data module DataModule"):
        made.fit(trivet.Module(), [1], datamodule=trivet.DataModule())
    with pytest.raises(ConfigurationError, match="Write datamodule="):
        made.fit(trivet.Module(), trivet.DataModule())
    with pytest.raises(ConfigurationError, match="clips nothing: give gradient_clip_val"):
        trivet.Trainer(accelerator="cpu", max_epochs=1, gradient_clip_algorithm="value")
