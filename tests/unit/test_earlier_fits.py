"""What an earlier fit of the process left is freed before the next one where it is much; else that costs nothing."""

import gc
import time
from weakref import ref

import scalar
import torch
from trivet import session


class Large(scalar.Scalar):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2048, 2048)


def fitted(module):
    scalar.trainer().fit(module, scalar.loader([1.0]))
    return ref(module)


def test_a_large_model_that_was_let_go_is_freed_before_the_next_fit():
    gc.disable()
    try:
        earlier = fitted(Large())
        assert earlier() is not None  # the trainer's own objects hold each other: otherwise this tests nothing
        fitted(scalar.Scalar())
        assert earlier() is None
    finally:
        gc.enable()


def test_small_fits_of_one_process_collect_once_in_a_while(monkeypatch):
    gc.collect()
    collected = []
    monkeypatch.setattr(gc, "collect", lambda *args: collected.append(args))
    monkeypatch.setattr(session, "_collected", [time.monotonic()])
    kept = [scalar.Scalar(), scalar.Scalar()]
    for module in kept:
        fitted(module)
    assert not collected
    session._collected[0] -= 21.0
    fitted(kept[0])
    assert len(collected) == 1
