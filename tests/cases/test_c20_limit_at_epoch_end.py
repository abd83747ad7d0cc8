"""C20: a step limit that falls on the end of an epoch, raised and resumed."""

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader


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


def train(path, *, max_steps, resume, validate, samples=4, loader=None, **options):
    module = Traced()
    trainer = scalar.trainer(max_steps=max_steps, **options)
    module.on_train_end = lambda: trainer.save_checkpoint(path)
    val = scalar.loader(2) if validate else None
    data = scalar.loader(samples) if loader is None else loader
    trainer.fit(module, data, val, ckpt_path=path if resume else None)
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


class Stream(IterableDataset):
    """Four numbers, whose count nobody knows before."""

    def __iter__(self):
        return iter(range(4))


LOADERS = {
    "a list of batches": lambda: [torch.tensor([float(x)]) for x in range(4)],
    "a stateful loader": lambda: StatefulDataLoader(scalar.Numbers(4), 1),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it
def test_of_data_that_is_not_read_by_index(kind, tmp_path):
    """A loader's length may be an estimate: then the end of the epoch is seen when there is no batch after it."""
    traces, everything = [], []
    for limit in (4, 8, 9):
        trace, progress, _ = train(
            tmp_path / "end", max_steps=limit, resume=limit > 4, validate=True, loader=LOADERS[kind]()
        )
        traces.append(trace)
        everything += trace
    whole = [x for e in range(3) for x in (f"start {e}", 0, 1, 2, 3, "validation", f"end {e}")]
    assert everything == whole[: len(everything)]
    assert (progress["epoch"], progress["update"], progress["samples"]) == (2, 9, 9)
    if kind == "a list of batches":
        assert traces[1] == ["start 1", 0, 1, 2, 3, "validation", "end 1"]


def test_a_stream_that_a_limit_of_batches_ends(tmp_path):
    options = {"validate": False, "limit_train_batches": 3}
    first, *_ = train(tmp_path / "end", max_steps=3, resume=False, loader=DataLoader(Stream(), 1), **options)
    second, progress, _ = train(tmp_path / "end", max_steps=6, resume=True, loader=DataLoader(Stream(), 1), **options)
    assert first == ["start 0", 0, 1, 2, "end 0"]
    assert second == ["start 1", 0, 1, 2, "end 1"]
    assert (progress["epoch"], progress["update"]) == (2, 6)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_with_accumulation_and_a_short_last_window(accumulate, tmp_path):
    """Four batches are two updates of two, or one of three and one of one."""
    options = {"validate": True, "accumulate_grad_batches": accumulate}
    first, *_ = train(tmp_path / "end", max_steps=2, resume=False, **options)
    second, progress, _ = train(tmp_path / "end", max_steps=4, resume=True, **options)
    assert first == ["start 0", 0, 1, 2, 3, "validation", "end 0"]
    assert second == ["start 1", 0, 1, 2, 3, "validation", "end 1"]
    assert (progress["epoch"], progress["update"], progress["samples"]) == (2, 4, 8)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_on_fewer_ranks_and_sharded(strategy, tmp_path):
    """The epoch that follows is the one that two processes would have had."""

    def half(max_steps, resume, world_size):
        trace, progress, w = train(
            tmp_path / "end", max_steps=max_steps, resume=resume, validate=True, samples=8,
            strategy=strategy, devices=world_size,
        )  # fmt: skip
        return trace, progress, w

    run(2, half, 4, False, 2)
    ((trace, progress, _),) = run(1, half, 8, True, 1)
    assert trace == ["start 1", *range(8), "validation", "end 1"]
    assert (progress["epoch"], progress["update"], progress["samples"]) == (2, 8, 16)


def test_by_epochs(tmp_path):
    """A limit of epochs, raised; with the checkpoint that the callback wrote."""
    callback = trivet.Checkpoint(tmp_path)
    options = {"max_epochs": 1, "enable_checkpointing": True, "callbacks": [callback], "max_steps": -1}
    train(tmp_path / "end", resume=False, validate=True, **options)
    trace, *_ = train(callback.last_model_path, resume=True, validate=True, max_steps=-1, max_epochs=2)
    assert trace == ["start 1", 0, 1, 2, 3, "validation", "end 1"]
