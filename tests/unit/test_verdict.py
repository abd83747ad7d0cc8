"""Who is to blame where no rank gets on, and the places that it is judged by."""

import threading

import pytest
import torch
import trivet
from trivet.launch import place, verdict
from trivet.launch.place import Place


def at(rank, waits="", calls=8, *, plain=None, still=9.0, guarded=False):
    plain = waits not in ("", "backward") and not waits.startswith("exchange") if plain is None else plain
    return Place(
        rank, "fit", "Net.training_step", f"net.py:{rank}", waits, calls, plain, guarded, still, f"line {rank}"
    )


def of(*places, size=2):
    return verdict.of({one.rank: one for one in places}, size, 9.0)


def sure(*places):
    return verdict.certain({one.rank: one for one in places}, len(places))


def test_the_rank_that_the_others_wait_for_is_named():
    found = of(at(0, "backward", 9), at(1))
    assert (found.rank, found.kind, found.stack) == (1, verdict.HANG, "line 1")
    assert found.text.startswith("nothing happened for 9 s (timeout): rank 1 is at net.py:1, in Net.")
    assert "rank 0 waits in backward (collective 9) at net.py:0" in found.text
    assert of(at(0), at(1, "all_reduce", 9)).rank == 0
    assert of(at(0, "the next batch of a DataLoader", plain=False), at(1, "backward", 9)).rank == 0
    assert of(at(0, "exchange of 'seed'"), at(1)).rank == 1


def test_a_rank_that_does_not_answer_is_named():
    found = of(at(0, "backward", 9), at(2, "backward", 9), size=3)
    assert (found.rank, found.stack) == (1, "")
    assert "rank 1 does not answer" in found.text


def test_all_in_the_same_collective_is_not_laid_on_the_code():
    found = of(at(0, "barrier", 9), at(1, "barrier", 9))
    assert found.kind == verdict.HANG
    assert "all ranks wait in the same collective" in found.text


@pytest.mark.parametrize(
    "places",
    [
        (at(0, "all_gather", 9), at(1, "backward", 9)),
        (at(0, "barrier", 9), at(1, "broadcast", 9)),
        (at(0, "exchange of 'seed'", 8), at(1, "all_reduce", 9)),
        (at(0, "exchange of 'seed'", 8), at(1, "exchange of 'names'", 8)),
    ],
)
def test_what_can_never_meet_is_certain(places):
    found = sure(*places)
    assert found.kind == verdict.MISMATCH
    assert str(places[0]) in found.text
    assert str(places[1]) in found.text
    assert sure(*reversed([*places])).kind == verdict.MISMATCH


@pytest.mark.parametrize(
    "places",
    [
        (at(0, "all_reduce", 9), at(1, "all_reduce", 9)),
        (at(0, "all_reduce", 9), at(1, "backward", 9)),
        (at(0, "broadcast", 9), at(1, "barrier", 10)),  # the second has ended the first's
        (at(0, "broadcast", 9), at(1)),
        (at(0, "broadcast", 9), at(1, "barrier", 9, plain=False)),  # of another group
        (at(0, "exchange of 'seed'", 9), at(1, "all_reduce", 9)),
        (at(0, "exchange of 'same/parameters were frozen'", 8), at(1, "all_reduce", 9)),  # which raises by itself
    ],
)
def test_what_may_meet_is_not(places):
    assert sure(*places) is None


def test_a_collective_inside_the_guard_is_certain_whatever_the_others_do():
    found = verdict.certain({0: at(0, "all_reduce", 9, guarded=True)}, 4)
    assert (found.rank, found.kind) == (0, verdict.MISMATCH)
    assert verdict.certain({0: at(0, "", guarded=True)}, 4) is None


def test_a_mismatch_is_laid_on_the_line_that_called_it():
    assert verdict.mismatch(at(0, "backward", 9), at(1, "barrier", 9)).rank == 1


class Waiting(torch.utils.data.Dataset):
    def __init__(self):
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.inside.set()
        self.go_on.wait(60)
        return torch.ones(1)


class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        raise ValueError("boom")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_place_is_read_off_the_stack():
    data, found = Waiting(), []

    def look():
        data.inside.wait(60)
        found.append(place.of_thread(main, 0, "epoch 0", 3.0))
        found.append(place.fingerprint(main))
        data.go_on.set()

    main, looking = threading.get_ident(), threading.Thread(target=look)
    looking.start()
    trainer = trivet.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="boom") as caught:
        trainer.fit(Net(), torch.utils.data.DataLoader(data, 1))
    looking.join()
    here, mark = found
    assert here.where == "Waiting.__getitem__"
    assert here.at.startswith(f"{__file__}:")
    assert here.stack.splitlines()[0].endswith("in __getitem__")
    assert (here.waits, here.still) == ("", 3.0)
    assert mark != place.fingerprint(main)
    raised = place.of_traceback(caught.value.__traceback__, 0, "epoch 0")
    assert raised.where == "Net.training_step"
