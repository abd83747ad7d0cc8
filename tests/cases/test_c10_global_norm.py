"""C10: gradients are clipped by the norm of the whole model, also where every rank holds a part of it."""

import clipped
import pytest
import torch
from ranks import run

STRATEGIES = ["ddp", "fsdp", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_clip_as_one_process(strategy):
    expected, norms = clipped.train("single", 1)
    assert min(norms) > clipped.CLIP
    for weights, found in run(2, clipped.train, strategy, 2):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-6)
