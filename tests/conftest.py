"""Settings for all tests."""

from __future__ import annotations

import os
import signal

# Two worker processes with a thread per core each would wait for one another on a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.pop("PYTEST_ADDOPTS", None)  # meant for this session, not for those that tests start

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, in which no Ctrl-C could be tried
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from distributions import install as install


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test begins with the same random numbers: torch seeds itself at random in each process."""
    import torch

    torch.manual_seed(0)
