"""What a first script gets wrong, and that it is told what to do instead of what torch makes of it."""

import warnings

import pytest
import scalar
import torch
import trivet
from ranks import outcomes, run
from torch import nn
from trivet.errors import CheckpointError, ConfigurationError

# ------------------------------------------------------------------------------------------------------------- losses


class Loses(scalar.Scalar):
    def __init__(self, function, *, manual=False):
        super().__init__(manual=manual)
        self.function = function

    def training_step(self, batch, batch_idx):
        loss = self.function(self.w * batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        return None


LOSSES = [
    (lambda x: x, r"a loss of shape \(2,\); expected one number, the mean over the batch. Reduce it, loss.mean\(\)"),
    (
        lambda x: x.mean().detach(),
        r"a loss \(torch.float32\) that depends on no parameter .* it was detached, computed",
    ),
    (lambda x: x.mean().item(), r"0\.0.* expected .* tensor .*without .item\(\)"),
    (lambda x: (x > 0).sum(), r"a loss \(torch.int64\) that depends on no parameter"),
    (lambda x: x.mean().to("meta"), "a loss on meta, and the run is on cpu. Compute it there: make new tensors"),
]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize(("function", "message"), LOSSES, ids=["shape", "detached", "float", "int", "device"])
def test_a_loss_that_has_no_backward(function, message, manual, precision):
    start = "manual_backward got " if manual else "training_step returned "
    with pytest.raises(ConfigurationError, match=start + ".*" + message):
        scalar.trainer(precision=precision).fit(Loses(function, manual=manual), scalar.loader(2, 2))


def test_a_loss_in_a_mapping():
    with pytest.raises(ConfigurationError, match=r"training_step returned the loss 3\.0, a float; expected a 0-dim"):
        scalar.trainer().fit(Loses(lambda x: {"loss": 3.0}), scalar.loader(2, 2))


def test_another_error_of_the_step_stays_what_it_is():
    def raises(x):
        raise RuntimeError("mine") from KeyError("cause")

    with pytest.raises(RuntimeError, match=r"^mine$") as caught:
        scalar.trainer().fit(Loses(raises), scalar.loader(2, 2))
    assert isinstance(caught.value.__cause__, KeyError)


# --------------------------------------------------------------------------------------------------------- optimizers


class Optimized(scalar.Scalar):
    def __init__(self, answer, frozen=False):
        super().__init__()
        self.answer = answer
        self.w.requires_grad_(not frozen)
        self.other = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        return (self.w * self.other * batch).mean()

    def configure_optimizers(self):
        return self.answer(self)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_optimizer_is_told_once(world_size):
    def train():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scalar.trainer(max_epochs=2).fit(Optimized(lambda module: None), scalar.loader(4))
        return [str(warning.message) for warning in caught if "optimizer" in str(warning.message)]

    told, *others = run(world_size, train)
    assert len(told) == 1
    assert (
        "Optimized.configure_optimizers() returned no optimizer, so the fit changes no parameter. Return one" in told[0]
    )
    assert others in ([], [[]])


def test_an_optimizer_of_frozen_parameters_alone_is_told():
    frozen = Optimized(lambda module: torch.optim.SGD([module.w], lr=1.0), frozen=True)
    with pytest.warns(UserWarning, match="an optimizer none of whose 1 parameters requires a gradient"):
        scalar.trainer().fit(frozen, scalar.loader(1))


def steps(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer)} | options}


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def plateau(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    found = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": found} | options}


MISTAKES = [
    (lambda m: steps(m, intervall="step"), r"Did you mean 'interval' instead of 'intervall'\?"),
    (lambda m: steps(m, interval="steps"), r"'interval': 'steps'; allowed are 'epoch' and 'update' \('step'\)"),
    (lambda m: steps(m, frequency=0), r"'frequency': 0; expected a whole number from 1 up"),
    (lambda m: {"optimiser": 1}, r"Did you mean 'optimizer' instead of 'optimiser'\?"),
    (lambda m: {"optimizer": 1, "lr_schedulers": 1}, r"Did you mean 'lr_scheduler' instead of 'lr_schedulers'\?"),
    (lambda m: plateau(m), "a ReduceLROnPlateau without a metric to watch; add 'monitor'"),
    (lambda m: "Adam", "returned 'Adam' where a torch.optim.Optimizer was expected"),
]


@pytest.mark.parametrize(("answer", "message"), MISTAKES)
def test_what_configure_optimizers_cannot_return(answer, message):
    with pytest.raises(ConfigurationError, match=message):
        scalar.trainer().fit(Optimized(answer), scalar.loader(1))


@pytest.mark.parametrize(
    "form",
    [
        lambda optimizer: ([optimizer], [schedule(optimizer)]),
        lambda optimizer: [[optimizer], [schedule(optimizer)]],
        lambda optimizer: ([optimizer], schedule(optimizer)),
        lambda optimizer: ([optimizer], {"scheduler": schedule(optimizer), "interval": "step", "frequency": 2}),
        lambda optimizer: {"optimizer": optimizer, "lr_scheduler": schedule(optimizer)},
        lambda optimizer: [{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "name": "x"}}],
        lambda optimizer: {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": schedule(optimizer), "interval": "epoch", "frequency": 1, "monitor": "x", "strict": True,
                "name": None, "reduce_on_plateau": False,
            },
        },
    ],
)  # fmt: skip
def test_what_configure_optimizers_may_return(form):
    module = Optimized(lambda module: form(torch.optim.SGD(module.parameters(), lr=1.0)))
    scalar.trainer().fit(module, scalar.loader(2))
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)


class Waits(Optimized):
    def on_train_epoch_end(self):
        if self.current_epoch > 1:
            self.log("late", 1.0)


@pytest.mark.parametrize("strict", [True, False])
def test_a_schedule_that_is_not_strict_waits_for_its_metric(strict):
    module, trainer = Waits(lambda m: plateau(m, monitor="late", strict=strict)), scalar.trainer(max_epochs=4)
    if strict:
        with pytest.raises(ConfigurationError, match="a scheduler monitors 'late', which was never logged"):
            trainer.fit(module, scalar.loader(1))
        return
    trainer.fit(module, scalar.loader(1))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 2


# ------------------------------------------------------------------------------------------------------------- modules


class Told(scalar.Scalar):
    """As it is written for several loaders: the last parameter has no default."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("v", batch.mean())

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx):
        self.ended = dataloader_idx


def test_a_step_that_has_to_be_told_the_number_of_its_loader():
    module, trainer = Told(), scalar.trainer()
    trainer.fit(module, scalar.loader(2), [scalar.loader(2), scalar.loader([4.0])])
    assert trainer.callback_metrics == {"v/dataloader_idx_0": 0.5, "v/dataloader_idx_1": 4.0}
    assert module.ended == 1
    with pytest.raises(
        ConfigurationError, match=r"Told.validation_step has to be told dataloader_idx, and there is one"
    ):
        scalar.trainer().fit(Told(), scalar.loader(2), scalar.loader(2))


def test_a_module_that_never_was_made():
    class Forgets(scalar.Scalar):
        def __init__(self):
            pass

    with pytest.raises(
        ConfigurationError, match=r"Forgets.__init__ does not call super\(\).__init__\(\). Call it first"
    ):
        scalar.trainer().fit(Forgets(), scalar.loader(1))


# --------------------------------------------------------------------------------------------------- unused parameters


class Unused(scalar.Scalar):
    """``spare`` is used up to an update."""

    def __init__(self, until=0):
        super().__init__()
        self.spare, self.until = nn.Linear(1, 1), until

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.spare(batch[:, None]).mean() if self.global_step < self.until else loss


@pytest.mark.parametrize("until", [0, 2])
def test_unused_parameters_under_ddp_are_named(until):
    found = outcomes(lambda: scalar.trainer(strategy="ddp").fit(Unused(until), scalar.loader(12)))
    text = " ".join(map(str, found))
    assert "loss did not depend on spare.weight, spare.bias, which got no gradient" in text
    assert "--strategy.find_unused_parameters true" in text
    assert any(isinstance(one, ConfigurationError) for one in found)


def test_unused_parameters_that_are_searched_for():
    strategy = {"name": "ddp", "find_unused_parameters": True}
    run(2, lambda: scalar.trainer(strategy=strategy).fit(Unused(2), scalar.loader(12)))


@pytest.mark.parametrize(
    ("loaders", "message"),
    [
        ((3,), "fit was given 3 as a loader. Expected a DataLoader"),
        (("digits",), "fit was given 'digits' as a loader"),
        (([torch.ones(1)], [None]), "a list of loaders with None among them. Leave it out"),
        (([torch.ones(1)], 3), "fit was given 3 as a loader"),
        ((torch.utils.data.TensorDataset(torch.ones(4, 1)),), r"the data set TensorDataset itself.*Give DataLoader\("),
    ],
)
def test_what_is_no_loader(loaders, message):
    with pytest.raises(ConfigurationError, match=message):
        scalar.trainer(max_epochs=1).fit(scalar.Scalar(), *loaders)


def test_a_module_without_a_step():
    with pytest.raises(ConfigurationError, match=r"Module has no training_step\(batch, batch_idx\), which fit needs"):
        scalar.trainer(max_epochs=1).fit(trivet.Module(), [torch.ones(1)])


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    trainer = scalar.trainer(max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path / "file")
    with pytest.raises(
        CheckpointError, match=r"directory of this run.*cannot be written: FileExistsError.* Give a def"
    ):
        trainer.fit(scalar.Scalar(), scalar.loader(2))


class Misnamed:
    def on_train_bach_end(self, *args):
        pass


@pytest.mark.parametrize(
    "make",
    [
        type("Net", (Misnamed, trivet.Module), {}),
        type("Data", (Misnamed, trivet.DataModule), {}),
        lambda: trivet.Trainer(callbacks=[type("Own", (Misnamed, trivet.Callback), {})()]),
    ],
    ids=["module", "datamodule", "callback"],
)
def test_a_misnamed_hook_is_found_at_construction(make):
    with pytest.raises(ConfigurationError, match="on_train_bach_end is named like a hook"):
        make()


class Forgets(scalar.Scalar):
    strict_loading = False

    def state_dict(self, *args, **options):
        return {}


def test_a_module_that_does_not_load_all_that_it_has(tmp_path):
    trainer = scalar.trainer(max_epochs=1)
    trainer.fit(Forgets(), scalar.loader(2))
    trainer.save_checkpoint(tmp_path / "saved")
    assert torch.equal(Forgets.load_from_checkpoint(tmp_path / "saved").w, Forgets().w)
    with pytest.raises(RuntimeError, match="Missing key"):
        Forgets.load_from_checkpoint(tmp_path / "saved", strict=True)
    scalar.trainer(max_epochs=2).fit(Forgets(), scalar.loader(2), ckpt_path=tmp_path / "saved")


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [(1j, {}, "expected a number"), (torch.tensor(1j), {}, "expected a real"), (1.0, {"batch_size": -1}, "=-1")],
)
def test_what_cannot_be_logged(value, options, message):
    class Logs(scalar.Scalar):
        def training_step(self, batch, batch_idx):
            self.log("a", value, **options)
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match=message):
        scalar.trainer(max_epochs=1).fit(Logs(), scalar.loader(2))


class Predicts(scalar.Scalar):
    def predict_step(self, batch, batch_idx):
        return batch


def test_predictions_of_a_loader_that_shuffles():
    with pytest.warns(UserWarning, match=r"loader that shuffles.* Give shuffle=False"):
        scalar.trainer().predict(Predicts(), scalar.loader(4, shuffle=True))


def test_a_directory_that_is_no_path():
    with pytest.raises(ConfigurationError, match="3 is no path"):
        trivet.Trainer(default_root_dir=3)
