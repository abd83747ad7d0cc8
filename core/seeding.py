"""Seeds: every random number of a run follows from the run's seed and a position, so nothing has to be saved.

Reseeding three generators takes a fifth of the time of saving and restoring their states (docs/decisions/0004).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import cache

import torch

from .errors import ConfigurationError

SEED_VARIABLE = "TRIVET_SEED"
_LARGEST_SEED = 2**32 - 1  # numpy's bound


def seed_everything(seed: int | None = None, workers: bool = True) -> int:
    """Seed Python's, numpy's and torch's generators, on all devices, and return the seed.

    Call it in every process before the model is built. Without ``seed`` the environment variable ``TRIVET_SEED`` rules,
    and where that is not set a seed is drawn. The seed is left in that variable for child processes. The Trainer takes
    ``torch.initial_seed()`` as the seed of the run. ``workers`` is accepted because Lightning has it: the workers of a
    loader always follow from the run's seed. Raises ConfigurationError for a seed outside of 0..2**32-1.
    """
    found: object = seed
    if found is None:
        found = os.environ.get(SEED_VARIABLE)
    if found is None:
        found = random.SystemRandom().randint(0, _LARGEST_SEED)
    try:
        value: int = int(found)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        value = -1
    if not 0 <= value <= _LARGEST_SEED:
        source = "seed_everything" if seed is not None else f"the environment variable {SEED_VARIABLE}"
        raise ConfigurationError(f"{source} got the seed {found!r}; expected an integer from 0 to {_LARGEST_SEED}.")
    os.environ[SEED_VARIABLE] = str(value)
    random.seed(value)
    if (seed_numpy := _numpy_seed()) is not None:
        seed_numpy(value)
    torch.manual_seed(value)
    return value


def derive(seed: int, *ints: int) -> int:
    """A number of 63 bits that follows from ``seed`` and the position ``ints``, the same in every process.

    It is Python's hash of a tuple, which is not randomised for integers.
    """
    return hash((seed, *ints)) & 0x7FFF_FFFF_FFFF_FFFF


def seed_all(value: int) -> None:
    """Seed Python's, numpy's and torch's global generators on the CPU; devices are the accelerator's. About 7 us.

    ``torch.manual_seed`` would seed all devices as well and take twenty times as long.
    """
    random.seed(value)
    if (seed_numpy := _numpy_seed()) is not None:
        seed_numpy(value & _LARGEST_SEED)
    torch.default_generator.manual_seed(value)


def seed_torch(value: int) -> None:
    """Seed torch's global generator on the CPU alone."""
    torch.default_generator.manual_seed(value)


@cache
def _numpy_seed() -> Callable[[int], None] | None:
    try:
        import numpy
    except ImportError:
        return None
    return numpy.random.seed
