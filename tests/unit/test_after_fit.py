"""What can be looked at when a fit has ended, in this process and where it ran in others."""

import pytest
import scalar
import torch
import trivet
from ranks import on_two_ranks
from trivet.errors import ConfigurationError


class Shows(scalar.Scalar):
    def training_step(self, batch, batch_idx):
        self.log("x", batch.mean(), prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("v", batch.mean())

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "name": "halving"}]


def look(module, trainer):
    return {
        "steps": (module.trainer is trainer, module.global_step, module.current_epoch, trainer.global_step),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "schedules": [schedule.name for schedule in trainer.lr_scheduler_configs],
        "batches": (trainer.num_training_batches, trainer.num_val_batches, trainer.estimated_stepping_batches),
        "metrics": trainer.callback_metrics,
        "bar": trainer.progress_bar_metrics,
        "strategy": type(trainer.strategy).__name__,
    }


def train(**options):
    module, trainer = Shows(), scalar.trainer(max_epochs=2, **options)
    trainer.fit(module, scalar.loader(4), scalar.loader(2))
    return module, trainer


def test_after_a_fit_in_this_process():
    module, trainer = train()
    found = look(module, trainer)
    assert found == {
        "steps": (True, 8, 2, 8), "lr": 0.25, "schedules": ["halving"], "batches": (4, [2], 8),
        "metrics": {"x": 3.0, "v": 0.5}, "bar": {"x": 3.0}, "strategy": "Single",
    }  # fmt: skip
    assert trainer.train_dataloader is not None
    trainer.validate(module, scalar.loader(2))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    with pytest.raises(ConfigurationError, match="Shows is not in a run: this works only in methods that the Trainer"):
        module.log("x", 1.0)


def test_a_checkpoint_saved_after_a_test_can_be_gone_on_from(tmp_path):
    module, trainer = train()
    trainer.validate(module, scalar.loader(2))
    trainer.save_checkpoint(tmp_path / "c")
    again = scalar.trainer(max_epochs=3)
    again.fit(Shows(), scalar.loader(4), scalar.loader(2), ckpt_path=tmp_path / "c")
    assert again.global_step == 12
    assert again.optimizers[0].param_groups[0]["lr"] == 0.125


def test_after_a_fit_on_two_ranks_that_others_started():
    def fit():
        module, trainer = train(strategy="ddp")
        with pytest.raises(ConfigurationError, match="after a run of 2 processes, which do not communicate any more"):
            trainer.save_checkpoint("never")
        return look(module, trainer)

    for found in on_two_ranks(fit):
        assert found["steps"] == (True, 4, 2, 4)
        assert found["batches"] == (2, [1], 4)
        assert found["lr"] == 0.25


def test_after_a_launched_fit_what_ended_with_it_says_so():
    module, trainer = train(devices=2)
    assert (module.trainer is trainer, module.global_step, trainer.num_training_batches) == (True, 4, 2)
    assert (trainer.callback_metrics["v"], trainer.estimated_stepping_batches) == (0.5, 4)
    for name in ("optimizers", "lr_scheduler_configs", "strategy", "engine"):
        with pytest.raises(ConfigurationError, match="this fit ran in processes of its own, and its optimizers"):
            getattr(trainer, name)


def test_a_trainer_that_is_sent_to_workers_brings_no_data_along():
    _, trainer = train()
    state = trainer.__getstate__()
    assert (state["train_data"], state["eval_data"], state["dataloaders"], state["_ended"]) == (None, {}, {}, None)
    assert isinstance(trainer, trivet.Trainer)
