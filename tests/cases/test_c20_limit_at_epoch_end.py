"""C20: a step limit that falls on the end of an epoch, raised and resumed."""

import pytest
import scalar
from ranks import run


class Traced(scalar.Scalar):
    def __init__(self):
        super().__init__()
        self.trace = []

    def training_step(self, batch, batch_idx):
        self.trace += [int(x) for x in batch]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", batch.mean())

    def on_train_epoch_start(self):
        self.trace.append(f"start {self.current_epoch}")

    def on_train_epoch_end(self):
        self.trace.append(f"end {self.current_epoch}")

    def on_validation_start(self):
        self.trace.append("validation")


def train(path, *, max_steps, resume, validate, samples=4):
    module = Traced()
    trainer = scalar.trainer(max_steps=max_steps)
    module.on_train_end = lambda: trainer.save_checkpoint(path)
    val = scalar.loader(2) if validate else None
    trainer.fit(module, scalar.loader(samples), val, ckpt_path=path if resume else None)
    return module.trace, trainer.progress.to_dict(), module.w.item()


@pytest.mark.parametrize("validate", [False, True], ids=["train only", "with validation"])
def test_the_second_run_does_exactly_one_more_epoch(tmp_path, validate):
    path = tmp_path / "end"
    validation = ["validation"] if validate else []
    trace, progress, _ = train(path, max_steps=4, resume=False, validate=validate)
    assert trace == ["start 0", 0, 1, 2, 3, *validation, "end 0"]
    assert (progress["epoch"], progress["update"], progress["batch"]) == (1, 4, 0)
    trace, progress, w = train(path, max_steps=8, resume=True, validate=validate)
    assert trace == ["start 1", 0, 1, 2, 3, *validation, "end 1"]
    assert (progress["epoch"], progress["update"], progress["samples"]) == (2, 8, 8)
    assert w == -12.0


def test_a_limit_within_an_epoch_neither_repeats_nor_omits(tmp_path):
    path = tmp_path / "middle"
    trace, progress, _ = train(path, max_steps=3, resume=False, validate=True)
    assert trace == ["start 0", 0, 1, 2]
    assert (progress["epoch"], progress["update"]) == (0, 3)
    trace, progress, w = train(path, max_steps=6, resume=True, validate=True)
    assert trace == [3, "validation", "end 0", "start 1", 0, 1]
    assert (progress["epoch"], progress["update"], w) == (1, 6, -7.0)


def test_the_same_limit_again_does_nothing(tmp_path):
    path = tmp_path / "end"
    train(path, max_steps=4, resume=False, validate=True)
    trace, progress, w = train(path, max_steps=4, resume=True, validate=True)
    assert trace == []
    assert (progress["epoch"], progress["update"], w) == (1, 4, -6.0)


def test_on_two_ranks(tmp_path):
    path = tmp_path / "end"

    def both():
        first = train(path, max_steps=4, resume=False, validate=True, samples=8)
        second = train(path, max_steps=8, resume=True, validate=True, samples=8)
        return first, second

    for rank, (first, second) in enumerate(run(2, both)):
        mine = [rank, 2 + rank, 4 + rank, 6 + rank]
        assert first[0] == ["start 0", *mine, "validation", "end 0"]
        assert second[0] == ["start 1", *mine, "validation", "end 1"]
        assert (second[1]["epoch"], second[1]["update"], second[1]["samples"]) == (2, 8, 16)
