"""What modules and callbacks reach for: hyperparameters, checkpoints, the Trainer's facts, callbacks of a module."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import nn
from trivet.callbacks.callback import Callback
from trivet.errors import CheckpointError, ConfigurationError

# ------------------------------------------------------------------------------------------------------ hyperparameters


class Base(scalar.Scalar):
    def __init__(self, width: int = 3, activation: Any = nn.ReLU) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, width)


class Derived(Base):
    def __init__(self, depth: int, width: int = 5) -> None:
        super().__init__(width)


def test_arguments_of_subclasses_are_kept_too():
    module = Derived(2)
    assert dict(module.hparams.items()) == {"width": 5, "activation": nn.ReLU, "depth": 2}
    module.hparams["width"] = 6
    module.hparams.update({"new": 1})
    assert (module.hparams.width, module.hparams.get("new"), module.hparams.get("old", 0)) == (6, 1, 0)


@pytest.mark.parametrize("given", [{"a": 1, "b": 2}, argparse.Namespace(a=1, b=2)])
def test_a_mapping_or_namespace_instead(given):
    class Module(scalar.Scalar):
        def __init__(self, options):
            super().__init__()
            self.save_hyperparameters(options, ignore="b")

    assert vars(Module(given).hparams) == {"a": 1}


def test_loggers_need_not_get_them():
    class Quiet(scalar.Scalar):
        def __init__(self, a):
            super().__init__()
            self.save_hyperparameters(logger=False)

    logger = scalar.Memory()
    scalar.trainer(logger=logger).fit(Quiet(1), scalar.loader(1))
    assert logger.hparams == {}


def test_a_data_module_keeps_its_arguments():
    class Data(trivet.DataModule):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    assert Data(3).hparams.size == 3


def test_load_from_checkpoint(tmp_path):
    module = Derived(2)
    trainer = scalar.trainer(max_epochs=1)
    trainer.fit(module, scalar.loader([1.0]))
    trainer.save_checkpoint(tmp_path / "one")
    found = Derived.load_from_checkpoint(tmp_path / "one")
    assert dict(found.hparams.items()) == dict(module.hparams.items())
    assert found.w.item() == -1.0
    assert torch.equal(found.layer.weight, module.layer.weight)
    assert Derived.load_from_checkpoint(tmp_path / "one", depth=7, map_location="cpu").hparams.depth == 7
    with pytest.raises(RuntimeError, match="size mismatch"):
        Derived.load_from_checkpoint(tmp_path / "one", width=2)

    class Needs(scalar.Scalar):
        def __init__(self, other):
            super().__init__()

    with pytest.raises(CheckpointError, match=r"Needs needs \['other'\], and the checkpoint's hyperparameters are"):
        Needs.load_from_checkpoint(tmp_path / "one", strict=False)
    assert Needs.load_from_checkpoint(tmp_path / "one", strict=False, other=1).w.item() == -1.0


def test_freeze_and_unfreeze():
    module = Base()
    module.freeze()
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    module.unfreeze()
    assert module.training
    assert all(p.requires_grad for p in module.parameters())


# -------------------------------------------------------------------------------------------------------------- trainer


class Facts(scalar.Scalar):
    def __init__(self):
        super().__init__()
        self.facts = {}

    def note(self, where):
        t = self.trainer
        self.facts[where] = {
            "stage": t.stage, "training": t.training, "evaluating": t.evaluating,
            "estimated": t.estimated_stepping_batches,
            "train": t.num_training_batches, "val": t.num_val_batches, "sanity": t.num_sanity_val_batches,
            "test": t.num_test_batches, "loader": t.train_dataloader, "module": t.module is self,
        }  # fmt: skip

    def configure_optimizers(self):
        self.note("configure_optimizers")
        return super().configure_optimizers()

    def validation_step(self, batch, batch_idx):
        self.note(self.trainer.stage)

    def test_step(self, batch, batch_idx):
        self.note("test")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert self.logger is self.trainer.logger
        assert self.loggers == self.trainer.loggers
        assert (self.local_rank, self.trainer.num_nodes, self.trainer.node_rank) == (0, 1, 0)
        self.note("fit")


def test_what_the_trainer_says():
    module, loader = Facts(), scalar.loader(5)
    trainer = scalar.trainer(max_epochs=3, accumulate_grad_batches=2, num_sanity_val_steps=1, logger=scalar.Memory())
    trainer.fit(module, loader, scalar.loader(3))
    early = module.facts["configure_optimizers"]
    assert (early["estimated"], early["train"], early["val"], early["sanity"]) == (9, 5, [3], [1])
    assert early["loader"] is loader
    assert early["module"]
    assert [module.facts[s]["stage"] for s in ("fit", "validate", "sanity_check")] == [
        "fit",
        "validate",
        "sanity_check",
    ]
    assert (module.facts["fit"]["training"], module.facts["validate"]["training"]) == (True, False)
    assert module.facts["sanity_check"]["evaluating"]
    trainer.test(module, scalar.loader(2))
    assert module.facts["test"]["test"] == [2]
    assert trainer.stage == ""
    assert trainer.module is module
    assert not any((trainer.training, trainer.testing, trainer.predicting, trainer.validating, trainer.evaluating))


def test_callbacks_by_kind():
    from trivet.callbacks import EarlyStopping

    stop, save = EarlyStopping("x"), trivet.Checkpoint()
    trainer = scalar.trainer(callbacks=[stop, save], enable_checkpointing=True)
    assert (trainer.early_stopping_callback, trainer.early_stopping_callbacks) == (stop, [stop])
    assert (trainer.checkpoint_callback, trainer.checkpoint_callbacks) == (save, [save])
    assert scalar.trainer().early_stopping_callback is None


class Hears(Callback):
    def __init__(self, name):
        self.name = name

    def on_train_start(self, trainer, module):
        module.heard.append(self.name)


class Other(Hears):
    pass


def test_callbacks_that_the_module_configures_replace_those_of_their_class():
    class Configures(scalar.Scalar):
        def __init__(self):
            super().__init__()
            self.heard = []

        def configure_callbacks(self):
            return Hears("module's")

    module = Configures()
    scalar.trainer(callbacks=[Hears("trainer's"), Other("other")]).fit(module, scalar.loader(1))
    assert module.heard == ["other", "module's"]


# ----------------------------------------------------------------------------------------------------------- collecting


def gather():
    class Gathers(scalar.Scalar):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            rank = float(self.global_rank)
            self.found = self.all_gather({"x": torch.tensor([rank]), "n": 3})
            value = (self.w + rank).reshape(1)
            self.all_gather(value, sync_grads=True).sum().backward()
            self.gradient, self.w.grad = self.w.grad.item(), None
            return loss

    module = Gathers()
    scalar.trainer(strategy="auto").fit(module, scalar.loader(2))
    return module.found["x"].tolist(), module.found["n"], module.gradient


def test_all_gather_of_structures_and_with_gradients():
    assert run(1, gather) == [([[0.0]], 3, 1.0)]
    assert run(2, gather) == [([[0.0], [1.0]], 3, 2.0)] * 2


# -------------------------------------------------------------------------------------------------------------- compile


def test_compiled_steps(tmp_path):
    """With the backend that runs what dynamo traced as it is: no compiler is needed."""

    class Layers(scalar.Scalar):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch.reshape(-1, 1)).mean() * self.w
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", self.layer(batch.reshape(-1, 1)).mean(), on_epoch=True)

        def predict_step(self, batch, batch_idx):
            return self.layer(batch.reshape(-1, 1))

    results = []
    for compiles in (False, {"backend": "eager"}):
        torch.manual_seed(0)
        module, trainer = Layers(), scalar.trainer(compile=compiles)
        trainer.fit(module, scalar.loader(3), scalar.loader(2))
        trainer.save_checkpoint(tmp_path / str(bool(compiles)))
        results.append((trainer.callback_metrics, module.state_dict(), trainer.predict(module, scalar.loader(1))))
    (metrics, weights, predicted), (metrics_, weights_, predicted_) = results
    assert metrics == pytest.approx(metrics_)
    assert list(weights) == list(weights_) == ["w", "layer.weight", "layer.bias"]
    for name, value in weights.items():
        torch.testing.assert_close(value, weights_[name])
    torch.testing.assert_close(predicted, predicted_)
    with pytest.raises(ConfigurationError, match="compile='yes': expected True, False or a mapping"):
        scalar.trainer(compile="yes")
