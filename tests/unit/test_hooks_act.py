"""Hooks that take part in the update: stepping, clearing, clipping, moving batches, ending an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import scalar
import torch
import trivet
from ranks import outcomes, run
from trivet.errors import ConfigurationError, RankFailed, TrivetError

# ------------------------------------------------------------------------------------------------------- optimizer_step


class WarmsUp(scalar.Scalar):
    """Lightning's documented form: the closure goes into step, the learning rate is set by hand."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        loss = optimizer.step(closure=optimizer_closure)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        assert isinstance(optimizer, torch.optim.SGD)
        for group in optimizer.param_groups:
            group["lr"] = 0.5


def test_an_override_steps_and_sets_the_learning_rate():
    module = WarmsUp()
    scalar.trainer().fit(module, scalar.loader([1.0, 2.0]))
    assert module.history == [-1.0, -2.0]  # 1 * 1, then 0.5 * 2
    assert module.losses == [0.0, -2.0]


class EverySecond(scalar.Scalar):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


def test_an_update_that_is_not_stepped_is_skipped():
    module, trainer = EverySecond(), scalar.trainer(precision="fp16", gradient_clip_val=9.0)
    trainer.fit(module, scalar.loader([1.0, 2.0, 4.0, 8.0]))
    assert module.history == [0.0, -2.0, -2.0, -10.0]
    assert (trainer.global_step, trainer.progress.skipped) == (2, 2)


def test_an_update_is_stepped_once():
    class Twice(scalar.Scalar):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(optimizer_closure)
            optimizer.step(optimizer_closure)

    with pytest.raises(ConfigurationError, match="called twice in one optimizer_step"):
        scalar.trainer().fit(Twice(), scalar.loader(1))


def test_gradients_may_be_kept():
    class Keeps(scalar.Scalar):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx != 1:
                super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    module = Keeps()
    scalar.trainer().fit(module, scalar.loader([1.0, 2.0, 4.0]))
    assert module.history == [-1.0, -4.0, -8.0]


def test_an_optimizer_clears_gradients_in_its_own_way():
    class Keeps(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            pass

    class Own(scalar.Scalar):
        def configure_optimizers(self):
            return Keeps(self.parameters(), lr=1.0)

    module = Own()
    scalar.trainer().fit(module, scalar.loader([1.0, 2.0, 4.0]))
    assert module.history == [-1.0, -4.0, -11.0]


# ------------------------------------------------------------------------------------------------------------- clipping


class ClipsItself(scalar.Scalar):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.given = gradient_clip_val, gradient_clip_algorithm
        self.clip_gradients(optimizer, 0.5 if self.global_step else 2.0, "norm")


def clip_itself(strategy: str) -> Any:
    module, trainer = ClipsItself(), scalar.trainer(strategy=strategy, gradient_clip_val=3.0)
    trainer.fit(module, scalar.loader([4.0] * 4))
    return module.history, module.given, trainer.callback_metrics["grad_norm"]


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("zero1", 2)])
def test_an_override_clips_complete_gradients(strategy, world_size):
    for history, given, norm in run(world_size, clip_itself, strategy):
        assert history[:2] == pytest.approx([-2.0, -2.5], abs=1e-5)
        assert given == (3.0, "norm")
        assert norm == pytest.approx(4.0)


def test_clipping_elsewhere_says_where_it_belongs():
    class Elsewhere(scalar.Scalar):
        def on_after_backward(self):
            self.clip_gradients(self.optimizers(), 1.0)

    with pytest.raises(ConfigurationError, match="outside of configure_gradient_clipping"):
        scalar.trainer().fit(Elsewhere(), scalar.loader(1))


# -------------------------------------------------------------------------------------------------------------- batches


class Moves(scalar.Scalar):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return super().training_step(batch, batch_idx)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch + 10

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device == self.device
        return super().transfer_batch_to_device(batch, device, dataloader_idx) * 2

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch + 1


class Data(trivet.DataModule):
    def train_dataloader(self):
        return scalar.loader(2)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert self.trainer.training
        return -batch


def test_hooks_on_the_way_to_the_device():
    module, other = Moves(), Moves()
    scalar.trainer().fit(module, scalar.loader(2))
    assert module.seen == [[21.0], [23.0]]
    scalar.trainer().fit(other, datamodule=Data())
    assert other.seen == [[-20.0], [-22.0]]  # the data module's hook instead of the module's


# -------------------------------------------------------------------------------------------------- the end of an epoch


class Ends(scalar.Scalar):
    def __init__(self, at, rank=None):
        super().__init__()
        self.at, self.rank, self.trace = at, rank, []

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == self.at and self.rank in (None, self.global_rank):
            return -1
        self.trace.append(batch_idx)
        return None

    def on_train_epoch_end(self):
        self.trace.append("end")

    def validation_step(self, batch, batch_idx):
        self.trace.append("v")


@pytest.mark.parametrize(("at", "right"), [(2, [0, 1, "v", "end"] * 2), (0, ["end"] * 2)])
def test_minus_one_ends_the_epoch_before_this_batch(at, right):
    module, trainer = Ends(at), scalar.trainer(max_epochs=2)
    trainer.fit(module, scalar.loader(5), scalar.loader(1))
    assert module.trace == right
    assert trainer.global_step == at * 2  # where nothing was trained, nothing is validated


def test_a_checkpoint_after_such_an_epoch_goes_on_with_the_next(tmp_path):
    save = trivet.Checkpoint(tmp_path, every_n_epochs=1, save_top_k=-1, save_last=True)
    scalar.trainer(max_epochs=1, callbacks=[save], enable_checkpointing=True).fit(Ends(2), scalar.loader(5))
    module = Ends(4)
    scalar.trainer(max_epochs=2).fit(module, scalar.loader(5), ckpt_path=save.last_model_path)
    assert module.trace == [0, 1, 2, 3, "end"]


def test_not_in_the_middle_of_an_update():
    with pytest.raises(ConfigurationError, match="returned -1 for batch 1, in the middle of an update of 2 micro"):
        scalar.trainer(accumulate_grad_batches=2).fit(Ends(1), scalar.loader(4))


def ends(rank):
    import trivet.session

    trivet.session.SAME_S = 1.0
    module = Ends(1, rank)
    scalar.trainer().fit(module, scalar.loader(6))
    return module.trace


def test_all_ranks_end_it_or_none():
    assert run(2, ends, None) == [[0, "end"]] * 2
    found = outcomes(ends, 0)
    told = [one for one in found if isinstance(one, TrivetError)]
    assert any("on_train_batch_start returned -1 on rank 0" in str(one) for one in told)
    assert all(isinstance(one, (TrivetError, RankFailed)) for one in found)


# -------------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("on_train_batch_start", lambda self, batch: None, r"cannot be called with \(batch, batch_idx\)"),
        ("optimizer_step", lambda self, optimizer: None, r"cannot be called with \(epoch, batch_idx, optimizer"),
        ("training_step", lambda self: None, r"cannot be called with \(batch, batch_idx\)"),
        ("validation_epoch_end", lambda self, outputs: None, r"is never called. Override on_validation_epoch_end"),
    ],
)
def test_a_hook_that_cannot_be_called_is_found_before_the_run(name, method, message):
    wrong = type("Wrong", (scalar.Scalar,), {name: method})
    with pytest.raises(ConfigurationError, match=rf"Wrong\.{name}.*{message}"):
        wrong()
