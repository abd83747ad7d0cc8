"""Module: hooks and their order, hyperparameters, optimizers and schedulers in all forms."""

import pytest
import scalar
import torch
import trivet
from ranks import on_two_ranks
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from trivet.callbacks.callback import Callback
from trivet.errors import ConfigurationError
from trivet.hooks import names_of

# hooks


def traced(base, trace, prefix):
    """A subclass that notes each hook, and where it stands when it is called."""

    def hook(name):
        def method(self, *args):
            trace.append(f"{prefix}{name}")

        return method

    shared = set(names_of(Callback)) & set(names_of(trivet.Module))
    names = names_of(Callback) if issubclass(base, Callback) else shared
    return type(f"Traced{base.__name__}", (base,), {name: hook(name) for name in names})


class WithValidation(scalar.Scalar):
    def training_step(self, batch, batch_idx):
        self.trace.append("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.trace.append("validation_step")

    def configure_optimizers(self):
        self.trace.append("configure_optimizers")
        return super().configure_optimizers()


def test_callbacks_come_before_the_module_in_list_order():
    trace = []
    module = traced(WithValidation, trace, "module ")()
    module.trace = []
    first, second = traced(Callback, trace, "first ")(), traced(Callback, trace, "second ")()
    type(second).state_key = "second"
    trainer = scalar.trainer(accumulate_grad_batches=2, num_sanity_val_steps=1, callbacks=[first, second])
    trainer.fit(module, scalar.loader(3), scalar.loader(2))
    assert trace[:4] == ["first setup", "second setup", "module setup", "first on_fit_start"]
    of = {who: [line.removeprefix(who) for line in trace if line.startswith(who)] for who in ("first ", "second ")}
    assert of["first "] == of["second "]
    for name in ("on_train_batch_end", "on_update_end", "on_validation_epoch_end", "teardown"):
        order = [line.split()[0] for line in trace if line.endswith(f" {name}")]
        assert order == ["first", "second", "module"] * (len(order) // 3)


@pytest.mark.parametrize("owner", [trivet.Module, Callback])
def test_a_misnamed_hook_is_an_error(owner):
    base = scalar.Scalar if owner is trivet.Module else Callback
    wrong = type("Wrong", (base,), {"on_train_epoch_finish": lambda self, *args: None})
    with pytest.raises(ConfigurationError, match=r"Wrong\.on_train_epoch_finish is named like a hook.*Did you mean"):
        scalar.trainer(callbacks=[wrong()] if owner is Callback else [], max_epochs=1).fit(wrong(), scalar.loader(2))


def test_hooks_see_what_they_are_said_to_see():
    seen = {}

    class Sees(scalar.Scalar):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "extra": 7}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen["outputs"], seen["graph"] = outputs["extra"], outputs["loss"].requires_grad

        def on_before_backward(self, loss):
            seen["loss"] = loss.requires_grad

        def on_before_optimizer_step(self, optimizer):
            seen["gradient"] = self.w.grad.item()

        def on_update_end(self):
            seen["step"], seen["epoch"] = self.global_step, self.current_epoch

    scalar.trainer(precision="fp16", gradient_clip_val=1.0).fit(Sees(), scalar.loader([4.0]))
    assert seen == {"outputs": 7, "graph": False, "loss": True, "gradient": 4.0, "step": 1, "epoch": 0}


def test_the_last_batch_of_an_epoch_is_known():
    found = []

    class Asks(scalar.Scalar):
        def training_step(self, batch, batch_idx):
            found.append(self.trainer.is_last_batch)
            return super().training_step(batch, batch_idx)

    trainer = scalar.trainer(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(Asks(), scalar.loader(3))
    assert found == [False, False, True] * 2
    assert not trainer.is_last_batch


def test_training_mode_is_put_back_after_validation():
    class Frozen(scalar.Scalar):
        def __init__(self):
            super().__init__()
            self.frozen, self.modes = nn.BatchNorm1d(1), []

        def on_train_start(self):
            self.frozen.eval()

        def validation_step(self, batch, batch_idx):
            assert not self.training
            assert not torch.is_grad_enabled()

        def training_step(self, batch, batch_idx):
            self.modes.append((self.training, self.frozen.training))
            return super().training_step(batch, batch_idx)

    module = Frozen()
    scalar.trainer(max_epochs=2).fit(module, scalar.loader(1), scalar.loader(1))
    assert module.modes == [(True, False)] * 2


# hyperparameters


class Hyper(scalar.Scalar):
    def __init__(self, width, rate=0.5, *, kind=None, **rest):
        super().__init__()
        self.save_hyperparameters(ignore=("kind",))


def test_hyperparameters():
    module = Hyper(3, kind="x", more=[1])
    assert vars(module.hparams) == {"width": 3, "rate": 0.5, "more": [1]}
    assert module.hparams.width == module.hparams["width"] == 3
    assert "rate" in module.hparams
    logger = scalar.Memory()
    scalar.trainer(logger=logger).fit(module, scalar.loader(1))
    assert logger.hparams == {"width": 3, "rate": 0.5, "more": [1]}


def test_only_the_named_hyperparameters():
    class Some(scalar.Scalar):
        def __init__(self, a, b, names):
            super().__init__()
            self.save_hyperparameters(*names)

    assert vars(Some(1, 2, ["b"]).hparams) == {"b": 2}
    with pytest.raises(ConfigurationError, match=r"__init__ has no argument 'c'; it has \['a', 'b', 'names'\]"):
        Some(1, 2, ["c"])


def test_hyperparameters_of_base_and_subclass_add_up():
    class Base(scalar.Scalar):
        def __init__(self, a):
            super().__init__()
            self.save_hyperparameters()

    class Sub(Base):
        def __init__(self, a, b):
            super().__init__(a)
            self.save_hyperparameters()

    assert vars(Sub(1, 2).hparams) == {"a": 1, "b": 2}


def test_save_hyperparameters_elsewhere_says_where():
    def somewhere(module):
        module.save_hyperparameters()

    with pytest.raises(ConfigurationError, match="must be called in the module's own __init__"):
        somewhere(scalar.Scalar())


# optimizers and schedulers


class Configured(scalar.Scalar):
    """Notes the learning rate that each update used."""

    def __init__(self, configure, **options):
        super().__init__(**options)
        self.configure, self.rates = configure, []

    def configure_optimizers(self):
        return self.configure(self)

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch, batch_idx):
        self.log("val", 1.0)


def rates(configure, val=None, **options):
    module = Configured(configure)
    scalar.trainer(**({"max_epochs": 2} | options)).fit(module, scalar.loader([0.0, 0.0]), val)
    return module.rates


def sgd(module):
    return SGD(module.parameters(), lr=1.0)


def halving(optimizer, **entry):
    return {"scheduler": StepLR(optimizer, 1, gamma=0.5), **entry}


def both(module, make):
    optimizer = sgd(module)
    return optimizer, make(optimizer)


def plain(optimizer):
    return StepLR(optimizer, 1, gamma=0.5)


def lists(optimizer, schedule):
    return [optimizer], [schedule]


def mapping(optimizer, schedule):
    return {"optimizer": optimizer, "lr_scheduler": schedule}


FORMS = {
    "two lists": lambda m: lists(*both(m, plain)),
    "two lists with a mapping": lambda m: lists(*both(m, halving)),
    "mapping": lambda m: mapping(*both(m, plain)),
    "mapping of mappings": lambda m: mapping(*both(m, halving)),
    "list of mappings": lambda m: [mapping(*both(m, halving))],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_steps_once_an_epoch(form):
    assert rates(FORMS[form]) == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("entry", "right"),
    [
        ({"interval": "update"}, [1.0, 0.5, 0.25, 0.125]),
        ({"interval": "step"}, [1.0, 0.5, 0.25, 0.125]),
        ({"interval": "update", "frequency": 2}, [1.0, 1.0, 0.5, 0.5]),
        ({"interval": "epoch", "frequency": 2}, [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]),
    ],
)
def test_intervals(entry, right):
    def configure(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": halving(optimizer, **entry)}

    assert rates(configure, max_epochs=len(right) // 2) == right


def test_an_update_is_a_window_of_batches():
    def configure(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": halving(optimizer, interval="update")}

    assert rates(configure, accumulate_grad_batches=2) == [1.0, 0.5]


def test_a_schedule_over_the_whole_run_that_knows_its_length():
    """Built inside configure_optimizers, where the number of updates is known."""

    def configure(module):
        optimizer = sgd(module)
        schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "update"}}

    found = rates(configure)
    plain = SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    schedule, right = OneCycleLR(plain, max_lr=1.0, total_steps=5), []
    for _ in range(4):
        right.append(plain.param_groups[0]["lr"])
        plain.step()
        schedule.step()
    assert found == right


@pytest.mark.parametrize("interval", ["epoch"])
def test_plateau_watches_a_metric(interval):
    def configure(module):
        optimizer = sgd(module)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val", "interval": interval}}

    assert rates(configure, scalar.loader(1), max_epochs=4) == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_lr_scheduler_step_can_be_overridden():
    class Mine(Configured):
        def lr_scheduler_step(self, scheduler, metric):
            assert metric is None
            scheduler.step()
            scheduler.step()

    def configure(module):
        optimizer = sgd(module)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    module = Mine(configure)
    scalar.trainer(max_epochs=2).fit(module, scalar.loader([0.0]))
    assert module.rates == [1.0, 0.25]


def test_under_manual_optimization_the_module_steps_its_schedules():
    class Manual(Configured):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step()

    def configure(module):
        optimizer = sgd(module)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]

    module = Manual(configure, manual=True)
    scalar.trainer(max_epochs=2).fit(module, scalar.loader([0.0, 0.0]))
    assert module.rates == [1.0, 0.5, 0.25, 0.125]


def test_a_module_without_optimizer():
    module = Configured(lambda m: None, manual=True)
    module.training_step = lambda batch, batch_idx: None
    with pytest.warns(UserWarning, match="returned no optimizer"):
        scalar.trainer().fit(module, scalar.loader(2))
    assert module.w.item() == 0.0


REFUSED = [
    (lambda m: [sgd(m), sgd(m)], "returned 2 optimizers under automatic optimization"),
    (lambda m: "adam", r"returned 'adam' where a torch\.optim\.Optimizer was expected"),
    (lambda m: {"optim": sgd(m)}, r"returned a mapping with the keys \['optim'\]; expected 'optimizer'"),
    (lambda m: ([sgd(m)], [{"interval": "epoch"}]), "expected 'scheduler' and, where wanted, 'interval'"),
    (lambda m: ([sgd(m)], [halving(sgd(m), interval="day")]), "'interval': 'day'; allowed are 'epoch' and 'update'"),
    (lambda m: ([sgd(m)], [3]), r"returned 3 as a scheduler; it has no step\(\)"),
    (
        lambda m: {"optimizer": sgd(m), "lr_scheduler": ReduceLROnPlateau(sgd(m))},
        "without a metric to watch; add 'monitor'",
    ),
    (lambda m: torch.optim.LBFGS(m.parameters()), r"LBFGS evaluates the loss several times per step"),
    (lambda m: Adam([nn.Parameter(torch.zeros(1))]), "an optimizer over none of the module's parameters"),
]


@pytest.mark.parametrize(("configure", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_configure_optimizers_must_not_return(configure, message):
    with pytest.raises(ConfigurationError, match=message):
        rates(configure)


def test_a_metric_that_was_never_logged():
    def configure(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "val/loss"}

    with pytest.raises(ConfigurationError, match=r"a scheduler monitors 'val/loss', which was never logged.*\['val'\]"):
        rates(configure, scalar.loader(1))


def test_lbfgs_with_a_closure():
    class Closure(scalar.Scalar):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = (self.w - batch.mean()) ** 2
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.5)

    module = Closure(manual=True)
    trainer = scalar.trainer(max_epochs=5)
    trainer.fit(module, scalar.loader([3.0]))
    assert module.w.item() == pytest.approx(3.0, abs=1e-3)
    assert trainer.global_step == 5
    for options, named in (
        ({"gradient_clip_val": 1.0}, "gradient clipping"),
        ({"accumulate_grad_batches": 2}, "accumulation"),
        ({"precision": "fp16"}, "loss scaling"),
    ):
        with pytest.raises(ConfigurationError, match=rf"step\(closure\).*cannot work with {named}"):
            scalar.trainer(**options).fit(Closure(manual=True), scalar.loader([3.0]))


# what a module can ask for


def test_outside_a_run():
    module = scalar.Scalar()
    assert (module.current_epoch, module.global_step, module.global_rank) == (0, 0, 0)
    assert module.device == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="is not attached to a Trainer"):
        module.trainer  # noqa: B018
    scalar.trainer().fit(module, scalar.loader(1))
    with pytest.raises(ConfigurationError, match="is not in a run"):
        module.optimizers()


def test_a_step_that_is_missing():
    class Empty(trivet.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

    with pytest.raises(ConfigurationError, match=r"Empty has no training_step\(batch, batch_idx\), which fit needs"):
        scalar.trainer().fit(Empty(), scalar.loader(1))
    Empty.training_step = lambda self, batch, batch_idx: self.layer(batch).mean()
    with pytest.raises(NotImplementedError, match=r"Empty has no configure_optimizers\(\); fit needs one"):
        scalar.trainer().fit(Empty(), scalar.loader(1))
    with pytest.raises(ConfigurationError, match=r"Empty has no validation_step\(batch, batch_idx\)"):
        scalar.trainer().validate(Empty(), scalar.loader(1))
    Empty.configure_optimizers = lambda self: torch.optim.SGD(self.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"has no validation_step.*but validation data was given"):
        scalar.trainer().fit(Empty(), scalar.loader(1), scalar.loader(1))


class Gathers(scalar.Scalar):
    def training_step(self, batch, batch_idx):
        self.print("only once")
        self.gathered = self.all_gather(batch).tolist()
        return super().training_step(batch, batch_idx)


def gather():
    module = Gathers()
    scalar.trainer().fit(module, scalar.loader(2))
    return module.gathered


def test_all_gather(capsys):
    assert gather() == [[1.0]]
    assert capsys.readouterr().out == "only once\n" * 2
    assert on_two_ranks(gather) == [[[0.0], [1.0]]] * 2


def test_toggling_gives_back_what_was():
    class Toggles(trivet.Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b, self.c = (nn.Linear(1, 1) for _ in range(3))
            self.c.requires_grad_(False)

        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            self.toggle_optimizer(first)
            self.toggled = [p.requires_grad for p in self.parameters()]
            if batch_idx:
                self.untoggle_optimizer(first)  # where it is forgotten, the end of the step does it

        def configure_optimizers(self):
            return [SGD(self.a.parameters(), lr=1.0), SGD([*self.b.parameters(), *self.c.parameters()], lr=1.0)]

    module = Toggles()
    scalar.trainer().fit(module, scalar.loader(2))
    assert module.toggled == [True, True, False, False, False, False]
    assert [p.requires_grad for p in module.parameters()] == [True] * 4 + [False] * 2


def test_lambda_schedules_resume_too(tmp_path):
    def configure(module):
        optimizer = sgd(module)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, lambda n: 0.5**n), "interval": "update"}]

    module, trainer = Configured(configure), scalar.trainer(max_steps=2)
    trainer.fit(module, scalar.loader([0.0] * 4))
    trainer.save_checkpoint(tmp_path / "a")
    module, trainer = Configured(configure), scalar.trainer(max_steps=4)
    trainer.fit(module, scalar.loader([0.0] * 4), ckpt_path=tmp_path / "a")
    assert module.rates == [0.25, 0.125]
