"""The options of `log`, where it is allowed, what it costs the host, and what ranks disagree about."""

import numpy
import pytest
import scalar
import torch
from ranks import on_two_ranks, outcomes
from torch.utils._python_dispatch import TorchDispatchMode
from trivet.errors import ConfigurationError, TrivetError
from trivet.launch.group import Group
from trivet.launch.world import World
from trivet.metrics import EPOCH, EVALUATION, STEP, Metrics


class Logs(scalar.Scalar):
    """Calls a function in each training step, another in each validation step, others in hooks by name."""

    def __init__(self, train=None, val=None, **hooks):
        super().__init__()
        self.in_train, self.in_val = train, val
        for name, function in hooks.items():
            setattr(self, name, lambda *args, function=function: function(self))

    def training_step(self, batch, batch_idx):
        if self.in_train is not None:
            self.in_train(self, batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        if self.in_val is not None:
            self.in_val(self, batch)


def fit(module, samples=4, *, val=None, **options):
    logger = scalar.Memory()
    trainer = scalar.trainer(**({"logger": logger, "log_every_n_steps": 1} | options))
    trainer.fit(module, scalar.loader(samples), val)
    return trainer, logger


# one name, several forms


def test_callback_metrics_have_a_forked_metric_under_its_plain_name_too():
    seen = []

    def train(module, batch):
        module.log("x", batch.mean(), on_step=True, on_epoch=True, prog_bar=True)
        seen.append(dict(module.trainer.callback_metrics))

    trainer, logger = fit(Logs(train), [1.0, 2.0, 6.0])
    assert seen[1] == {"x": 2.0, "x_step": 2.0}
    assert trainer.callback_metrics == {"x": 3.0, "x_step": 6.0, "x_epoch": 3.0}
    assert logger.column("x_step") == [(1, 1.0), (2, 2.0), (3, 6.0)]
    assert logger.column("x_epoch") == [(3, 3.0)]
    assert logger.column("x") == []
    assert trainer.logged_metrics == {"x_step": 6.0, "x_epoch": 3.0}


def test_the_number_of_the_loader_comes_last_and_can_be_left_out():
    def val(module, batch):
        module.log("x", batch.mean(), on_step=True, on_epoch=True)
        module.log("both", batch.mean(), add_dataloader_idx=False)

    trainer, logger = fit(Logs(val=val), val=[scalar.loader([1.0, 3.0]), scalar.loader([5.0])])
    found = trainer.callback_metrics
    assert found["x_epoch/dataloader_idx_0"] == found["x/dataloader_idx_0"] == 2.0
    assert found["x_epoch/dataloader_idx_1"] == 5.0
    assert found["both"] == 3.0
    assert logger.column("x_step/dataloader_idx_0") == [(4, 1.0), (4, 3.0)]  # one row per batch, one axis


def test_what_is_not_for_the_loggers_is_in_no_row():
    trainer, logger = fit(Logs(lambda module, _: module.log("x", 1.0, on_epoch=True, logger=False)))
    assert trainer.callback_metrics["x_epoch"] == 1.0
    assert not any(name.startswith("x") for _, row in logger.rows for name in row)
    assert "x_epoch" not in trainer.logged_metrics


@pytest.mark.parametrize("fx", [torch.sum, "SUM", sum])
def test_a_reduction_is_named_or_torchs_function(fx):
    trainer, _ = fit(Logs(lambda m, b: m.log("x", b.mean(), on_step=False, on_epoch=True, reduce_fx=fx)), [1.0, 2.0])
    assert trainer.callback_metrics["x"] == 3.0


def test_a_value_may_be_changed_after_it_was_logged():
    def train(module, batch):
        loss = module.w * 0 + batch.mean()
        module.log("part", loss, on_step=False, on_epoch=True)
        loss += 100
        module.log("numpy", numpy.float32(2.0))

    found = fit(Logs(train), [1.0, 2.0])[0].callback_metrics
    assert (found["part"], found["numpy"]) == (1.5, 2.0)


def test_the_same_name_from_a_step_and_from_the_epochs_end():
    """The later one is what is shown, as they are two metrics."""
    trainer, logger = fit(
        Logs(lambda m, b: m.log("x", b.mean()), on_train_epoch_end=lambda m: m.log("x", 9.0)), [1.0, 2.0]
    )
    assert trainer.callback_metrics["x"] == 9.0
    assert logger.column("x") == [(1, 1.0), (2, 2.0), (2, 9.0)]


def test_a_skipped_update_writes_no_row_again():
    class Skips(Logs):
        def training_step(self, batch, batch_idx):
            self.log("x", batch.mean())
            return None if batch_idx in (2, 3) else super().training_step(batch, batch_idx)

    _, logger = fit(Skips(), [1.0] * 6, log_every_n_steps=2)
    assert [step for step, row in logger.rows if "x" in row] == [2, 4]


# where it is allowed


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_end", "on_fit_end", "on_validation_end"])
def test_hooks_that_belong_to_no_step_and_no_epoch_cannot_log(hook):
    module = Logs(**{hook: lambda module: module.log("x", 1.0)})
    with pytest.raises(ConfigurationError, match=r"log\('x'\) was called in .*, which belongs to no step and no epoch"):
        fit(module, val=scalar.loader(1))


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_validation_start"])
def test_hooks_at_the_start_log_for_the_epoch(hook):
    trainer, _ = fit(Logs(**{hook: lambda module: module.log("x", 1.0)}), val=scalar.loader(1))
    assert trainer.callback_metrics["x"] == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.log("x", 1, enable_graph=True), r"log\('x', enable_graph=True\): what is logged is a number by"),
        (lambda m: m.log_dict({"x": 1}, sync_dist_group=3), r"log\('x', sync_dist_group=\.\.\.\): a logged value is"),
        (lambda m: m.log("x", 1, reduce_fx=torch.median), r"allowed are mean, sum, min, max, by name or as torch's"),
        (lambda m: m.log("x", 1, sync_dist="all"), r"sync_dist='all'\): allowed are True, False and 'sparse'"),
        (lambda m: m.log("x", 1, sync_dist=True, rank_zero_only=True), "rank 0 alone is not reduced over ranks"),
        (lambda m: m.log(3, 1), "the first argument is the metric's name, a string"),
        (lambda m: m.log("step", 1), r"log\('step'\): this name is taken, every row has it"),
        (lambda m: m.log("a/dataloader_idx_0", 1), "this name is taken, Trivet adds that itself"),
        (lambda m: m.log("x", {"a": 1}), r"got \{'a': 1\}; expected a number, a 0-dim tensor, or an object"),
        (lambda m: (m.log("x", 1), m.log("x", 1, prog_bar=True)), r"was called twice with different options"),
    ],
)  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(Logs(lambda module, _: call(module)))


def test_no_step_at_the_epochs_end():
    with pytest.raises(ConfigurationError, match=r"on_step=True\) was called in .*, which has no step"):
        fit(Logs(on_train_epoch_end=lambda module: module.log("x", 1.0, on_step=True)))


# the host


class Reads(TorchDispatchMode):
    """Counts what makes the host wait: reading a number, and copies to another place."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def test_a_step_that_logs_reads_nothing_on_the_host():
    """Metrics themselves, with tensors that are not on the CPU as far as they can see."""

    class Elsewhere(torch.Tensor):
        is_cpu = False

    def metrics(where):
        one = Metrics("training", Group(World(), None, torch.device("cpu")))
        one.defaults = where
        return one

    for where in (STEP, EVALUATION, EPOCH):
        one = metrics(where)
        value = torch.ones(()).as_subclass(Elsewhere)
        with Reads() as reads:
            for weight in range(300):
                one.weight = weight % 3 + 1.0
                one.log("a", value, (False, True, None, True, "mean", None, False), None, True, None)
                one.log("b", value, (False, True, None, True, "max", None, False), None, True, None)
        assert reads.count == 0
        assert one.epoch_row() == ({"a_epoch": 1.0, "b_epoch": 1.0} if where is STEP else {"a": 1.0, "b": 1.0})


def test_a_whole_step_reads_nothing_on_the_host():
    class Counts(Logs):
        def on_train_start(self):
            self.reads = Reads()
            self.reads.__enter__()

        def on_update_end(self):
            pass

        def on_train_epoch_end(self):
            self.reads.__exit__(None, None, None)

    def reads(samples):
        module = Counts(lambda module, batch: module.log_dict({"a": module.w * 2, "b": batch.mean()}, on_epoch=True))
        fit(module, samples, log_every_n_steps=1000, logger=False)
        return module.reads.count

    assert reads(20) == reads(60)  # the first update is compared with the plan


# several ranks


def collectives(function):
    """How many collectives a function called."""
    from unittest import mock

    names = ("all_reduce", "all_gather", "broadcast", "all_gather_object")
    patches = [mock.patch.object(torch.distributed, n, wraps=getattr(torch.distributed, n)) for n in names]
    spies = [patch.start() for patch in patches]
    try:
        function()
    finally:
        for patch in patches:
            patch.stop()
    return sum(spy.call_count for spy in spies)


def flush(number):
    """Rows of many metrics on two ranks, in the group of a run that is under way: (row, collectives) for each."""
    found = []

    def at_start(module):
        one = Metrics("training", module.trainer._run.group)
        one.defaults = STEP
        for _ in range(2):
            for i in range(number):
                fx = ("mean", "sum", "min", "max")[i % 4]
                value = torch.tensor(float(module.global_rank + i))
                options = (False, True, False, True, fx, None, False)
                one.log(f"m{i}", value, options, 1.0 + 2 * module.global_rank, True, None)
            row = {}
            found.append((row, collectives(lambda row=row, one=one: row.update(one.epoch_row()))))

    fit(Logs(on_train_start=at_start))
    return found


def test_a_flush_is_one_collective_however_many_metrics():
    for few, again in on_two_ranks(flush, 4):
        assert few == again == ({"m0": 0.75, "m1": 3.0, "m2": 2.0, "m3": 4.0}, 1)
    for many, again in on_two_ranks(flush, 100):
        assert many[1] == 2  # the room has to grow once
        assert again == (many[0], 1)
        assert many[0]["m99"] == 100.0


def two_names(options):
    def train(module, batch):
        name, value = (("a", 10.0), ("b", 20.0))[module.global_rank]
        module.log(name, value, **options)

    trainer, logger = fit(Logs(train))
    return trainer.callback_metrics, logger.rows


@pytest.mark.parametrize("options", [{"on_epoch": True}, {"sync_dist": True}], ids=["epoch", "step"])
def test_c21_ranks_that_log_different_names(options):
    for outcome in outcomes(two_names, options):
        assert isinstance(outcome, TrivetError)
        assert "rank 0 did not log ['b']; rank 1 did not log ['a']" in str(outcome)


@pytest.mark.parametrize("options", [{"on_step": False, "on_epoch": True}, {}], ids=["epoch", "step"])
def test_c21_in_sparse_mode_each_is_reduced_over_the_ranks_that_have_it(options):
    (found, rows), (other, _) = on_two_ranks(two_names, {"sync_dist": "sparse", **options})
    if options:
        assert found == other == {"a": 10.0, "b": 20.0}
        assert rows[-1][1] == {"a": 10.0, "b": 20.0, "epoch": 0.0}
    else:
        assert (found["a"], other["b"]) == (10.0, 20.0)


def test_what_rank_zero_alone_logs():
    def train():
        def one(module, batch):
            if module.global_rank == 0:
                module.log("mine", 7.0, on_step=False, on_epoch=True, rank_zero_only=True)
            module.log("called by all", float(module.global_rank), on_epoch=True, rank_zero_only=True)

        trainer, _ = fit(Logs(one))
        return trainer.callback_metrics

    first, second = on_two_ranks(train)
    assert first["mine"] == 7.0
    assert first["called by all_epoch"] == 0.0
    assert second == {}


@pytest.mark.parametrize(("fx", "expected"), [("mean", 2.5), ("sum", 5.0), ("min", 2.0), ("max", 3.0)])
def test_a_step_is_reduced_over_ranks_as_it_is_over_steps(fx, expected):
    def train():
        trainer, _ = fit(Logs(lambda m, b: m.log("x", b.mean(), sync_dist=True, reduce_fx=fx)))
        return trainer.callback_metrics["x"]

    assert on_two_ranks(train) == [expected] * 2


def test_a_rank_without_a_batch_writes_the_same_row():
    def train():
        module = Logs(val=lambda m, b: m.log("v", b.mean(), on_step=True, on_epoch=True))
        return fit(module, val=scalar.loader([5.0]))[0].callback_metrics["v_epoch"]

    assert on_two_ranks(train) == [5.0] * 2
