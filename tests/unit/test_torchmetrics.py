"""Metric objects by duck typing: torchmetrics where it is installed, and objects of one's own."""

import warnings

import pytest
import scalar
import trivet
from ranks import on_two_ranks
from torch import nn
from trivet.errors import ConfigurationError

torchmetrics = pytest.importorskip("torchmetrics")


class Measured(scalar.Scalar):
    """Measures the mean of the samples in training and validation."""

    def __init__(self, *, call=True, **options):
        super().__init__()
        self.train_mean, self.val_mean = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.call, self.options = call, options

    def training_step(self, batch, batch_idx):
        (self.train_mean if self.call else self.train_mean.update)(batch)
        self.log("train", self.train_mean, **self.options)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.val_mean.update(batch)
        self.log("val", self.val_mean)


def fit(module, samples=5, batch_size=2, *, val=None, ckpt_path=None, **options):
    logger = scalar.Memory()
    trainer = scalar.trainer(**({"logger": logger, "log_every_n_steps": 1} | options))
    trainer.fit(module, scalar.loader(samples, batch_size), val and scalar.loader(val, batch_size), ckpt_path=ckpt_path)
    return trainer, logger


class Counts(nn.Module):
    """By duck typing: a metric that nobody can read by name."""

    def __init__(self):
        super().__init__()
        self.reset()

    def update(self, batch):
        self.total += float(batch.sum())

    def compute(self):
        return self.total

    def reset(self):
        self.total = 0.0


class Counted(Measured):
    def __init__(self):
        super().__init__(call=False, on_step=False, on_epoch=True)
        self.train_mean = Counts()


@pytest.mark.parametrize("at", [1, 3])
def test_a_checkpoint_says_which_metric_it_cannot_hold(tmp_path, at):
    class Saves(trivet.Callback):
        def on_update_end(self, trainer, module):
            if trainer.global_step == at:
                trainer.save_checkpoint(tmp_path / "one")
                trainer.save_checkpoint(tmp_path / "two")

        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "three")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Counted(), callbacks=[Saves()])
    told = [str(one.message) for one in caught if "does not hold" in str(one.message)]
    assert len(told) == 1
    assert "does not hold what the metric 'train_mean' (Counts) has gathered" in told[0]


def test_the_epochs_value_is_computed_and_reset_at_its_end():
    module = Measured(on_step=True, on_epoch=True, prog_bar=True)
    trainer, logger = fit(module, val=[1.0, 2.0, 6.0], max_epochs=2)
    assert logger.column("train_step") == [(1, 0.5), (2, 2.5), (3, 4.0), (4, 0.5), (5, 2.5), (6, 4.0)]
    assert logger.column("train_epoch") == [(3, 2.0), (6, 2.0)]
    assert logger.column("val") == [(3, 3.0), (6, 3.0)]
    assert trainer.callback_metrics["train"] == trainer.callback_metrics["train_epoch"] == 2.0
    assert module.train_mean.update_count == module.val_mean.update_count == 0
    assert not module.train_mean._forward_hooks


def test_a_metric_that_is_only_updated_has_no_value_for_the_step():
    with pytest.raises(ConfigurationError, match=r"Call it, self\.train_mean\(\.\.\.\), instead of update, or log it"):
        fit(Measured(call=False))
    assert fit(Measured(call=False, on_step=False, on_epoch=True))[0].callback_metrics["train"] == 2.0


class Collected(scalar.Scalar):
    def __init__(self):
        super().__init__()
        self.seen = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.classification.BinaryAccuracy(),
                "prec": torchmetrics.classification.BinaryPrecision(),
            },
            prefix="train/",
        )

    def training_step(self, batch, batch_idx):
        self.seen(batch / 5, (batch > 1).long())
        self.log_dict(self.seen, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_collection_is_computed_as_a_whole():
    trainer, logger = fit(Collected())
    found = trainer.callback_metrics
    assert found["train/acc_epoch"] == pytest.approx(0.8)  # 0.4 is below one half, and 2 is above one
    assert found["train/prec_epoch"] == 1.0
    assert logger.column("train/acc_step") == [(1, 1.0), (2, 0.5), (3, 1.0)]


class Wrong(Collected):
    def training_step(self, batch, batch_idx):
        self.log("x", self.seen)


def test_a_collection_is_not_one_metric():
    with pytest.raises(ConfigurationError, match=r"log\('x'\) got a collection of metrics\. Use log_dict"):
        fit(Wrong())


def test_where_a_metric_has_to_live():
    class Hidden(scalar.Scalar):
        def __init__(self, **options):
            super().__init__()
            self.hidden, self.options = [torchmetrics.MeanMetric()], options

        def training_step(self, batch, batch_idx):
            self.hidden[0].update(batch)
            self.log("x", self.hidden[0], on_step=False, on_epoch=True, **self.options)

    with pytest.raises(ConfigurationError, match=r"a MeanMetric that is no attribute of Hidden.*Assign it in __init__"):
        fit(Hidden())
    with pytest.raises(ConfigurationError, match="metric_attribute='hidden'"):
        fit(Hidden(metric_attribute="hidden"))


def test_what_is_no_number_is_refused():
    class Matrix(scalar.Scalar):
        def __init__(self):
            super().__init__()
            self.matrix = torchmetrics.classification.BinaryConfusionMatrix()

        def training_step(self, batch, batch_idx):
            self.matrix.update(batch / 5, (batch > 1).long())
            self.log("x", self.matrix, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match=r"logged as 'x' gave shape \(2, 2\), and a metric is one number"):
        fit(Matrix())


class Own:
    """Neither a module nor torchmetrics."""

    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(float(value))

    def compute(self):
        return max(self.values)

    def reset(self):
        self.values = []


def test_an_object_of_ones_own():
    class Mine(scalar.Scalar):
        def __init__(self):
            super().__init__()
            self.own = Own()

        def training_step(self, batch, batch_idx):
            self.own.update(batch.max())
            self.log("x", self.own, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    module = Mine()
    assert fit(module)[0].callback_metrics["x"] == 4.0
    assert module.own.values == []


class Resumed(scalar.Scalar):
    """A mean with weights, a list of scores, a collection, and one that is never logged."""

    def __init__(self, path=None):
        super().__init__()
        self.path = path
        self.mean = torchmetrics.MeanMetric()
        self.area = torchmetrics.classification.BinaryAUROC()
        self.both = nn.ModuleDict(
            {"group": torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])}
        )
        self.silent = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        self.mean(batch)
        self.area.update(batch / 8, (batch.int() % 2).long())
        self.both["group"].update(batch)
        self.silent.update(batch)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("area", self.area, on_step=False, on_epoch=True)
        self.log_dict(self.both["group"], on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_update_end(self):
        if self.path and self.global_step == 2:
            self.trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self):
        self.log("silent", self.silent.compute())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_resumed_in_the_middle_of_an_epoch(world_size, tmp_path):
    def train(path=None, ckpt_path=None):
        trainer, _ = fit(Resumed(path), 8, 1, ckpt_path=ckpt_path, log_every_n_steps=100)
        return trainer.callback_metrics

    def both():
        return train(str(tmp_path / "c")), train(None, str(tmp_path / "c"))

    for whole, resumed in [both()] if world_size == 1 else on_two_ranks(both):
        assert whole == resumed
        assert whole["mean_epoch"] == whole["MeanMetric"] == 3.5
        assert whole["MaxMetric"] == 7.0
        assert whole["silent"] == 28.0


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_ranks_with_uneven_batches(samples):
    """Also a rank that has no batch at all, whose metric has a list of scores that is empty and of another dtype."""

    class Uneven(Measured):
        def __init__(self):
            super().__init__(on_step=False, on_epoch=True)
            self.area = torchmetrics.classification.BinaryAUROC()

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.area.update(batch / 8, (batch > 0).long())
            self.log("area", self.area)

    def train():
        return fit(Uneven(), samples, 1, val=samples)[0].callback_metrics

    for found in on_two_ranks(train):
        assert found["val"] == (samples - 1) / 2
        assert found["area"] == (1.0 if samples > 1 else 0.0)


def test_a_rank_without_a_batch_computes_with_the_others_in_every_epoch():
    class Shown(Measured):
        def on_train_epoch_end(self):
            self.shown = [*vars(self).get("shown", []), self.trainer.callback_metrics["val"]]

    def train():
        module = Shown(on_step=False, on_epoch=True)
        fit(module, 4, 1, val=1, max_epochs=3, num_sanity_val_steps=-1)
        return module.shown

    assert on_two_ranks(train) == [[0.0] * 3] * 2


def test_the_last_steps_value_is_shown_where_no_row_was_due():
    trainer, _ = fit(Measured(on_step=True, on_epoch=True), log_every_n_steps=50)
    assert trainer.callback_metrics["train_step"] == 4.0
