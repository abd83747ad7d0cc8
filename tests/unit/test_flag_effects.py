"""Every flag by what it changes that can be seen, alone and in pairs; and what is refused."""

import itertools
import random
import warnings
from datetime import timedelta

import numpy
import pytest
import scalar
import torch
import trivet
from ranks import on_two_ranks
from torch import nn
from torch.utils.data import DataLoader
from trivet.callbacks.summary import ModelSummary
from trivet.errors import ConfigurationError


class Traced(scalar.Scalar):
    """``trace``: batches by number, with a letter for validation, test and prediction; ``seen``: samples trained on."""

    def __init__(self, **hooks):
        super().__init__()
        self.trace, self.seen = [], []
        for name, function in hooks.items():
            setattr(self, name, lambda *args, function=function: function(self))

    def training_step(self, batch, batch_idx):
        self.trace.append(batch_idx)
        self.seen.append(int(batch[0]))
        self.log("x", batch.mean())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.trace.append(f"v{batch_idx}")

    def test_step(self, batch, batch_idx):
        self.trace.append(f"t{batch_idx}")

    def predict_step(self, batch, batch_idx):
        self.trace.append(f"p{batch_idx}")


def fit(samples=4, val=2, module=None, shuffle=False, **options):
    module = module or Traced()
    trainer = scalar.trainer(**options)
    trainer.fit(module, scalar.loader(samples, shuffle=shuffle), scalar.loader(val))
    return module, trainer


def trace(samples=4, val=1, **options):
    return fit(samples, val, **options)[0].trace


V = ["v0"]

EFFECTS = [
    # flags, what a fit of 4 batches with 1 for validation does
    ({}, [0, 1, 2, 3, *V]),
    ({"max_epochs": 2}, [0, 1, 2, 3, *V] * 2),
    ({"max_steps": 2}, [0, 1]),
    ({"max_steps": 5, "min_steps": 5}, [0, 1, 2, 3, *V, 0]),
    ({"limit_train_batches": 2}, [0, 1, *V]),
    ({"limit_train_batches": 0.5}, [0, 1, *V]),
    ({"limit_train_batches": None}, [0, 1, 2, 3, *V]),
    ({"limit_train_batches": 0, "num_sanity_val_steps": 1}, V),
    ({"limit_val_batches": 0}, [0, 1, 2, 3]),
    ({"overfit_batches": 2}, [0, 1, *V]),
    ({"val_check_interval": 2}, [0, 1, *V, 2, 3, *V]),
    ({"val_check_interval": 0.5}, [0, 1, *V, 2, 3, *V]),
    ({"val_check_interval": "2 batches"}, [0, 1, *V, 2, 3, *V]),
    ({"val_check_interval": "0.5 epochs"}, [0, 1, *V, 2, 3, *V]),
    ({"val_check_interval": "2 epochs", "max_epochs": 4}, [0, 1, 2, 3, 0, 1, 2, 3, *V] * 2),
    ({"val_check_interval": "1 update", "accumulate_grad_batches": 2}, [0, 1, *V, 2, 3, *V]),
    ({"val_check_interval": "3 updates", "max_epochs": 2}, [0, 1, 2, *V, 3, 0, 1, *V, 2, 3]),
    ({"val_check_interval": "1 h"}, [0, 1, 2, 3]),
    ({"val_check_interval": timedelta(hours=1)}, [0, 1, 2, 3]),
    ({"val_check_interval": {"hours": 1}}, [0, 1, 2, 3]),
    ({"val_check_interval": "00:01:00:00"}, [0, 1, 2, 3]),
    ({"val_check_interval": timedelta(microseconds=1)}, [0, *V, 1, *V, 2, *V, 3, *V]),
    ({"check_val_every_n_epoch": 2, "max_epochs": 2}, [0, 1, 2, 3, 0, 1, 2, 3, *V]),
    (
        {"check_val_every_n_epoch": None, "val_check_interval": 6, "max_epochs": 3},
        [0, 1, 2, 3, 0, 1, *V, 2, 3, 0, 1, 2, 3, *V],
    ),
    ({"num_sanity_val_steps": 1}, [*V, 0, 1, 2, 3, *V]),
    ({"num_sanity_val_steps": -1}, [*V, 0, 1, 2, 3, *V]),
    ({"fast_dev_run": True}, [0, *V]),
    ({"fast_dev_run": 2, "max_epochs": 9, "limit_val_batches": 0, "num_sanity_val_steps": 5}, [0, 1, *V]),
    ({"max_time": "10 min"}, [0, 1, 2, 3, *V]),
    ({"max_time": {"minutes": 10}, "max_epochs": 1}, [0, 1, 2, 3, *V]),
    ({"barebones": True}, [0, 1, 2, 3, *V]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), EFFECTS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_a_flag_does_to_a_fit(options, expected):
    if "max_time" in options:
        options = {"max_epochs": 1, **options}
    if options.get("barebones"):
        module = Traced()
        trivet.Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(module, scalar.loader(4), scalar.loader(1))
        assert module.trace == expected
    else:
        assert trace(**options) == expected


@pytest.mark.parametrize("unit", ["10 s", "10 min", "2 hours", "1 d"])
def test_times(unit):
    number, name = unit.split()
    seconds = int(number) * {"s": 1, "min": 60, "hours": 3600, "d": 86400}[name]
    assert scalar.trainer(max_time=unit).limits.max_seconds == seconds
    assert scalar.trainer(val_check_interval=unit).limits.val_every_seconds == seconds


def test_the_interval_of_the_log_has_a_unit():
    assert scalar.trainer(log_every_n_steps="7 updates").log_every_n_steps == 7


UNITS = [
    ({"max_epochs": "2 epochs"}, [0, 1, 2, 3, *V] * 2),
    ({"max_steps": "2 updates"}, [0, 1]),
    ({"max_steps": "5 steps", "min_steps": "5 updates"}, [0, 1, 2, 3, *V, 0]),
    ({"max_epochs": 2, "check_val_every_n_epoch": "2 epochs"}, [0, 1, 2, 3, 0, 1, 2, 3, *V]),
    ({"num_sanity_val_steps": "1 batch"}, [*V, 0, 1, 2, 3, *V]),
    ({"limit_train_batches": "2 batches", "limit_val_batches": "1 epoch"}, [0, 1, *V]),
    ({"limit_train_batches": "0.5 epochs"}, [0, 1, *V]),
    ({"overfit_batches": "2 batches"}, [0, 1, *V]),
    ({"val_check_interval": "1 update", "accumulate_grad_batches": "2 batches"}, [0, 1, *V, 2, 3, *V]),
]


@pytest.mark.parametrize(("options", "expected"), UNITS, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_a_number_may_say_its_unit(options, expected):
    assert trace(**options) == expected


def test_test_and_predict_are_limited_too():
    module = Traced()
    trainer = scalar.trainer(limit_test_batches=2, limit_predict_batches=0.5)
    trainer.test(module, scalar.loader(4))
    trainer.predict(module, scalar.loader(6))
    assert module.trace == ["t0", "t1", "p0", "p1", "p2"]


def test_overfit_batches_gives_the_same_batches_in_every_epoch():
    shuffled = fit(16, shuffle=True, overfit_batches=3, max_epochs=3)[0].seen
    assert shuffled[:3] == shuffled[3:6] == shuffled[6:]
    generator = torch.Generator().manual_seed(3)
    module, loader = Traced(), scalar.loader(16, shuffle=True, generator=generator)
    scalar.trainer(overfit_batches=0.25, max_epochs=2).fit(module, loader)
    assert module.seen[:4] == module.seen[4:]


def test_reload_dataloaders_every_n_epochs():
    class Loads(Traced):
        def train_dataloader(self):
            self.trace.append("train")
            return scalar.loader(1)

        def val_dataloader(self):
            self.trace.append("val")
            return scalar.loader(1)

    for every, expected in ((0, []), (1, ["train", "val"]), (2, [])):
        module = Loads()
        scalar.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=every).fit(module)
        assert module.trace == ["train", "val", 0, *V, *expected, 0, *V]
    with pytest.raises(ConfigurationError, match="fit was given the training loader itself"):
        fit(reload_dataloaders_every_n_epochs=1)


class Reloaded(Traced):
    """Asked again and again, it gives more data, in larger batches where there are ``sizes``."""

    def __init__(self, sizes=(1,)):
        super().__init__()
        self.asked, self.sizes, self.updates = 0, sizes, []

    def train_dataloader(self):
        self.asked += 1
        return scalar.loader(4 * self.asked, self.sizes[min(self.asked, len(self.sizes)) - 1])

    def val_dataloader(self):
        return scalar.loader(1)

    def on_train_epoch_end(self):
        self.updates.append(self.global_step)


def test_reloaded_data_keeps_what_was_set_since():
    module = Reloaded()
    scheduler = trivet.callbacks.GradientAccumulationScheduler({1: 2})
    trainer = scalar.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[scheduler])
    trainer.fit(module)
    assert module.updates == [4, 8, 14]  # 4 updates of one batch, then of two

    module = Reloaded()
    scalar.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, val_check_interval=0.5).fit(module)
    assert module.trace == [0, 1, *V, 2, 3, *V, 0, 1, 2, 3, *V, 4, 5, 6, 7, *V]

    module = Reloaded(sizes=(1, 2))
    scalar.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1, global_batch_size=4).fit(module)
    assert module.updates == [1, 3]


def test_reloaded_data_keeps_the_accumulation_of_a_checkpoint(tmp_path):
    first = scalar.trainer(max_epochs=1, accumulate_grad_batches=2)
    first.fit(Reloaded())
    first.save_checkpoint(tmp_path / "c")
    module = Reloaded()
    scalar.trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module, ckpt_path=tmp_path / "c")
    assert module.updates == [4, 8]  # of 4 and of 8 batches, two at a time


class Looks(Traced):
    def on_train_batch_start(self, batch, batch_idx):
        self.looked = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.is_anomaly_enabled(),
        )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False, False, False)),
        ({"deterministic": True}, (True, False, False, False)),
        ({"deterministic": "warn"}, (True, True, False, False)),
        ({"benchmark": True}, (False, False, True, False)),
        ({"detect_anomaly": True}, (False, False, False, True)),
    ],
)
def test_switches_of_the_process_are_put_back(options, expected):
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        assert fit(module=Looks(), **options)[0].looked == expected
    after = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.is_anomaly_enabled()
    assert after == before


def test_a_fit_leaves_the_generators_as_they_were():
    states = lambda: (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist())  # noqa: E731
    before = states()
    first = fit(8, shuffle=True)[0].seen
    after = states()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert fit(8, shuffle=True)[0].seen == first


@pytest.mark.parametrize("mode", [True, False])
def test_inference_mode(mode):
    modes = []
    module = Traced(on_validation_batch_end=lambda module: modes.append(torch.is_inference_mode_enabled()))
    trainer = scalar.trainer(inference_mode=mode)
    trainer.fit(module, scalar.loader(1), scalar.loader(1))
    trainer.validate(module, scalar.loader(1))
    assert modes == [False, mode]  # within a fit without gradients only


def test_barebones_has_nothing_that_costs(capsys, tmp_path):
    module = Traced()
    trainer = trivet.Trainer(accelerator="cpu", barebones=True, max_epochs=1, default_root_dir=tmp_path / "runs")
    trainer.fit(module, scalar.loader(2), scalar.loader(1))
    assert (trainer.callbacks, trainer.loggers, trainer.callback_metrics) == ([], [], {})
    assert not (tmp_path / "runs").exists()
    assert capsys.readouterr() == ("", "")


def test_enable_model_summary():
    assert not any(isinstance(callback, ModelSummary) for callback in scalar.trainer().callbacks)
    assert isinstance(scalar.trainer(enable_model_summary=True).callbacks[0], ModelSummary)


def test_fast_dev_run_takes_what_a_logger_takes(tmp_path):
    def draws(module):
        module.logger.experiment.add_histogram("w", module.w, module.global_step)
        module.logger.log_image(key="w", images=[])

    module = Traced(on_train_epoch_end=draws)
    trainer = trivet.Trainer(
        accelerator="cpu", fast_dev_run=True, enable_progress_bar=False, default_root_dir=tmp_path / "runs"
    )
    trainer.fit(module, scalar.loader(1), scalar.loader(1))
    assert trainer.callback_metrics == {"x": 0.0}
    assert not (tmp_path / "runs").exists()
    assert scalar.trainer(fast_dev_run=True, logger=False).logger is None


def test_fast_dev_run_saves_nothing(tmp_path):
    module, saver = Traced(), trivet.Checkpoint(tmp_path / "c")
    trainer = trivet.Trainer(accelerator="cpu", fast_dev_run=2, callbacks=[saver], enable_progress_bar=False)
    trainer.fit(module, scalar.loader(9), scalar.loader(9))
    assert module.trace == [0, 1, "v0", "v1"]
    assert trainer.callbacks == []
    assert not (tmp_path / "c").exists()


class Normed(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sync_batchnorm_has_the_statistics_of_all_ranks():
    data = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).double()

    def train(batch_size, strategy=None):
        torch.manual_seed(1)
        module, options = Normed(), {"strategy": strategy, "sync_batchnorm": True} if strategy else {}
        scalar.trainer(precision="fp64", max_epochs=2, **options).fit(module, DataLoader(data, batch_size))
        return {name: value.clone() for name, value in module.state_dict().items()}

    alone = train(4)
    for together in on_two_ranks(train, 2):
        assert not torch.allclose(together["layers.1.running_mean"], alone["layers.1.running_mean"])
    for strategy in ("ddp", "fsdp", "zero1", "zero3"):
        for together in on_two_ranks(train, 2, strategy):
            assert together.keys() == alone.keys()
            for name, value in alone.items():
                torch.testing.assert_close(together[name], value, rtol=1e-9, atol=1e-9)


def test_a_time_between_validations_is_agreed_by_ranks():
    def train():
        return trace(8, val=2, val_check_interval=timedelta(microseconds=1), log_every_n_steps=2)

    assert on_two_ranks(train) == [[0, 1, "v0", 2, 3, "v0"], [0, 1, "v1", 2, 3, "v1"]]


# in pairs

PAIRED = {
    "max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "val_check_interval": 2,
    "accumulate_grad_batches": 2, "max_steps": 3, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 1,
    "log_every_n_steps": 1, "deterministic": True, "detect_anomaly": True, "gradient_clip_val": 0.5,
}  # fmt: skip


def expected(
    max_epochs=None, limit_train_batches=4, limit_val_batches=2, val_check_interval=None, accumulate_grad_batches=1,
    max_steps=None, check_val_every_n_epoch=1, num_sanity_val_steps=0, **_,
):  # fmt: skip
    """The trace by a few lines that know nothing of the loop."""
    v = [f"v{i}" for i in range(limit_val_batches)]
    found, update = v[:num_sanity_val_steps], 0
    for epoch in range(max_epochs or (9 if max_steps else 1)):
        if update == max_steps:
            break
        validates = (epoch + 1) % check_val_every_n_epoch == 0
        due = 0
        for batch in range(limit_train_batches):
            found.append(batch)
            if (batch + 1) % accumulate_grad_batches == 0 or batch + 1 == limit_train_batches:
                update += 1
                if val_check_interval and validates and (batch + 1) // val_check_interval > due:
                    due = (batch + 1) // val_check_interval
                    found += v
                if update == max_steps:
                    break
        if batch + 1 == limit_train_batches and validates and not val_check_interval:
            found += v
    return found


@pytest.mark.parametrize("pair", list(itertools.combinations(PAIRED, 2)), ids="+".join)
def test_two_flags_together(pair):
    options = {name: PAIRED[name] for name in pair}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        assert trace(4, 2, **options) == expected(**options)


# what is refused

REFUSED = [
    ({"max_epochs": 0, "min_epochs": 3}, "min_epochs=3 and max_epochs=0 contradict each other"),
    ({"max_steps": 2, "min_steps": 3}, "min_steps=3 and max_steps=2 contradict each other"),
    ({"overfit_batches": 2, "limit_train_batches": 3}, "overfit_batches=2 and limit_train_batches=3 contradict"),
    ({"overfit_batches": 0.5, "limit_val_batches": 0}, r"overfit_batches=0\.5 and limit_val_batches=0 contradict"),
    ({"overfit_batches": 2, "fast_dev_run": True}, "overfit_batches and fast_dev_run contradict each other"),
    ({"overfit_batches": None}, "overfit_batches=None: expected a number of batches, or a fraction"),
    ({"deterministic": True, "benchmark": True}, "deterministic and benchmark=True contradict each other"),
    ({"deterministic": "yes"}, "deterministic='yes': allowed are True, False, 'warn'"),
    ({"detect_anomaly": 1}, "detect_anomaly=1: allowed are True, False"),
    ({"barebones": True, "enable_checkpointing": True}, "barebones=True and enable_checkpointing=True contradict"),
    ({"barebones": True, "profiler": "simple"}, "barebones=True and profiler='simple' contradict"),
    ({"val_check_interval": "2 fortnights"}, "allowed are a number of batches; a fraction .* '100 updates'.*'10 min'"),
    ({"val_check_interval": "0 updates"}, "expected more than 0"),
    ({"val_check_interval": "1.5 updates"}, "expected a whole number of updates"),
    ({"val_check_interval": "1.5 epochs"}, "beyond one epoch expected whole epochs"),
    ({"val_check_interval": 0.5, "check_val_every_n_epoch": None}, "is a part of an epoch, and check_val_every"),
    ({"check_val_every_n_epoch": None}, "check_val_every_n_epoch=None: then val_check_interval counts on"),
    ({"max_time": "3 updates"}, "max_time='3 updates': allowed are a number of seconds; '10 min'"),
    ({"max_time": {"weeks_": 1}}, "max_time=.*allowed are"),
    ({"log_every_n_steps": "10 min"}, "log_every_n_steps='10 min': allowed are a whole number of updates; '100"),
    ({"max_epochs": "3 updates"}, "max_epochs='3 updates': allowed are .* '100 epochs'. That is what max_steps is for"),
    ({"max_steps": "1 h"}, "max_steps='1 h': allowed are .* '100 updates'. That is what max_time is for"),
    ({"min_epochs": "2 steps"}, "min_epochs='2 steps': allowed are .* That is what min_steps is for"),
    ({"max_epochs": "1.5 epochs"}, "max_epochs='1.5 epochs': allowed are a whole number of epochs; '100 epochs'.$"),
    ({"max_epochs": "three"}, "max_epochs='three': allowed are a whole number of epochs"),
    ({"accumulate_grad_batches": "2 updates"}, "accumulate_grad_batches='2 updates': allowed are .* batches"),
    ({"limit_val_batches": "2 epochs"}, "limit_val_batches='2 epochs': a limit is at most '1 epoch'"),
    ({"limit_train_batches": "2 updates"}, "allowed are a number of batches; a fraction .*'100 batches'; '0.5 epochs'"),
    ({"benchmark": "yes"}, "benchmark='yes': allowed are True, False, None"),
    ({"enable_progress_bar": "yes"}, "enable_progress_bar='yes': allowed are True, False, None"),
    ({"gradient_clip_val": "1"}, "gradient_clip_val='1': expected a positive number"),
    ({"accumulate_grad_batches": {0: 2}}, "from 1 up; by epochs they are the callback GradientAccumulationScheduler's"),
    ({"fast_dev_run": 0.5}, r"fast_dev_run=0\.5: expected True, False or a number of batches"),
    ({"reload_dataloaders_every_n_epochs": -1}, "reload_dataloaders_every_n_epochs=-1: expected a whole number"),
    ({"plugins": ["ddp"]}, "plugins='ddp': expected objects of a Strategy, Accelerator, Precision or Launcher"),
    ({"plugins": scalar.Memory()}, "It belongs to logger="),
    ({"max_epoch": 3}, "Trainer has no argument 'max_epoch'. Did you mean 'max_epochs'"),
    ({"use_distributed_sampler": False}, "no argument 'use_distributed_sampler'. Nothing is needed: samples are dealt"),
    ({"gpus": 2}, "no argument 'gpus'. accelerator='cuda', devices=N"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        scalar.trainer(
            **({} if "barebones" not in options else {"logger": None, "enable_progress_bar": None}) | options
        )


def test_plugins_are_placed_by_their_kind():
    from trivet import registry

    precision, strategy = registry.make("precision", "bf16").plugin, registry.make("strategy", "single").plugin
    plan = scalar.trainer(plugins=[precision, strategy]).plan()
    assert (plan.precision, plan.strategy) == ("bf16-mixed", "single")
    with pytest.raises(ConfigurationError, match="precision='fp64' and the precision in plugins="):
        scalar.trainer(plugins=precision, precision="fp64")
    with pytest.raises(ConfigurationError, match="its arguments have names, such as max_epochs=3"):
        trivet.Trainer("cpu")
