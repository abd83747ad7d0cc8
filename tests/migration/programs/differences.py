"""Where the numbers differ on purpose: each function is one small run, and prints what came out of it."""

import json
import random
import sys
import tempfile

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, values):
        self.values = [float(value) for value in values]

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return torch.tensor(self.values[index])


class Scalar(pl.LightningModule):
    """One parameter w, loss w * x, SGD with learning rate 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.seen, self.calls = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return self.w * batch.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_train_epoch_end(self):
        self.calls.append("on_train_epoch_end")

    def teardown(self, stage):
        self.calls.append("teardown")


def short_window():
    """Three batches of the number 1, in windows of two: the last window holds one batch. Gives w."""
    module = Scalar()
    pl.Trainer(**QUIET, max_epochs=1, accumulate_grad_batches=2).fit(module, DataLoader(Numbers([1, 1, 1])))
    return module.w.item()


def two_optimizers():
    """Two optimizers step in each batch, with max_steps=6. Gives the number of batches."""

    class Pair(Scalar):
        def __init__(self):
            super().__init__()
            self.v = nn.Parameter(torch.zeros(()))
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.seen.append(batch.tolist())
            for optimizer, param in zip(self.optimizers(), (self.w, self.v), strict=True):
                optimizer.zero_grad()
                self.manual_backward(param * batch.mean())
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([param], lr=1.0) for param in (self.w, self.v)]

    module = Pair()
    pl.Trainer(**QUIET, max_steps=6).fit(module, DataLoader(Numbers([1] * 10)))
    return len(module.seen)


def shuffling():
    """The order of samples with shuffle=True, and with one more random number drawn before fit. Gives whether equal."""
    orders = []
    for draws in (0, 1):
        pl.seed_everything(1)
        torch.rand(draws)
        module = Scalar()
        pl.Trainer(**QUIET, max_epochs=1).fit(module, DataLoader(Numbers(range(20)), shuffle=True))
        orders.append(module.seen)
    return orders[0] == orders[1]


def noise():
    """Noise drawn in the step, without and with a callback that draws, too. Gives whether it is the same."""

    class Noisy(Scalar):
        def training_step(self, batch, batch_idx):
            self.seen.append(torch.rand(()).item())
            return self.w * batch.mean()

    class Draws(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            torch.rand(1)
            random.random()

    drawn = []
    for callbacks in ([], [Draws()]):
        pl.seed_everything(1)
        module = Noisy()
        pl.Trainer(**QUIET, max_epochs=1, callbacks=callbacks).fit(module, DataLoader(Numbers(range(6))))
        drawn.append(module.seen)
    return drawn[0] == drawn[1]


def resumed_noise():
    """Two epochs and two more, out of a checkpoint, against four at once, with noise. Gives whether it is the same."""

    class Noisy(Scalar):
        def training_step(self, batch, batch_idx):
            self.seen.append(torch.rand(()).item())
            return self.w * batch.mean()

    def train(epochs, folder, ckpt_path=None):
        pl.seed_everything(1)
        module, options = Noisy(), {**QUIET, "enable_checkpointing": True}
        save = ModelCheckpoint(folder, save_last=True)
        data = DataLoader(Numbers(range(6)), shuffle=True)
        pl.Trainer(**options, max_epochs=epochs, callbacks=[save]).fit(module, data, ckpt_path=ckpt_path)
        return module.seen, save.last_model_path

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        whole, _ = train(4, one)
        first, path = train(2, other)
        second, _ = train(4, other, path)
    return first + second == whole


def broken_off_epoch():
    """max_steps=2 in an epoch of 5 batches. Gives how often on_train_epoch_end was called."""
    module = Scalar()
    pl.Trainer(**QUIET, max_steps=2).fit(module, DataLoader(Numbers([1] * 5)))
    return module.calls.count("on_train_epoch_end")


def teardown_after_an_exception():
    """A step that raises. Gives whether the module's teardown was called."""

    class Fails(Scalar):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    module = Fails()
    try:
        pl.Trainer(**QUIET, max_epochs=1).fit(module, DataLoader(Numbers([1])))
    except ZeroDivisionError:
        return "teardown" in module.calls


def hook_that_is_none():
    """A method on_train_epoch_ends. Gives whether anybody says that it is no hook."""

    class Misspelt(Scalar):
        def on_train_epoch_ends(self):
            pass

    try:
        pl.Trainer(**QUIET, max_epochs=1).fit(Misspelt(), DataLoader(Numbers([1])))
    except ValueError:
        return True
    return False


def callbacks_after_test():
    """Test with the best checkpoint after a fit that was stopped early. Gives whether the callback still knows when."""

    class Worse(Scalar):
        def validation_step(self, batch, batch_idx):
            self.log("loss", float(self.current_epoch))

        def test_step(self, batch, batch_idx):
            pass

    with tempfile.TemporaryDirectory() as folder:
        stop = EarlyStopping("loss", patience=2)
        options = {**QUIET, "enable_checkpointing": True}
        save = ModelCheckpoint(folder, monitor="loss")
        trainer, data = pl.Trainer(**options, max_epochs=9, callbacks=[stop, save]), DataLoader(Numbers([1]))
        module = Worse()
        trainer.fit(module, data, data)
        before = stop.stopped_epoch
        trainer.test(module, data, ckpt_path="best", verbose=False)
    return stop.stopped_epoch == before


def weight_of_a_batch():
    """Batches of 4 and 1 samples, as a list of a 5-long tensor and the numbers; logs 4 and 1. Gives the mean."""

    class Means(Scalar):
        def training_step(self, batch, batch_idx):
            self.log("mean", float(len(batch[1])), on_step=False, on_epoch=True)
            return self.w * batch[1].mean()

    def together(samples):
        return [torch.zeros(5), torch.stack(samples)]

    trainer = pl.Trainer(**QUIET, max_epochs=1)
    trainer.fit(Means(), DataLoader(Numbers(range(5)), batch_size=4, collate_fn=together))
    return round(trainer.callback_metrics["mean"].item(), 6)


def bf16_by_an_object():
    """bf16-mixed with the accelerator as an object. Gives the dtype of a layer's output."""

    class Layer(Scalar):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            out = self.layer(batch.view(-1, 1))
            self.seen.append(str(out.dtype))
            return out.float().mean()

    module = Layer()
    options = {**QUIET, "accelerator": CPUAccelerator()}
    pl.Trainer(**options, max_epochs=1, precision="bf16-mixed").fit(module, DataLoader(Numbers([1])))
    return module.seen[0]


def main():
    cases = [
        short_window, two_optimizers, shuffling, noise, resumed_noise, broken_off_epoch, teardown_after_an_exception,
        hook_that_is_none, callbacks_after_test, weight_of_a_batch, bf16_by_an_object,
    ]  # fmt: skip
    return {case.__name__: case() for case in cases}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()), file=sys.stdout)
