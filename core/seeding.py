"""Seeds: every random number of a run follows from the run's seed and a position, so nothing has to be saved.

Reseeding three generators takes a fifth of the time of saving and restoring their states (docs/decisions/0004).
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .errors import ConfigurationError

SEED_VARIABLE = "TRIVET_SEED"
_LARGEST_SEED = 2**32 - 1  # numpy's bound
_WORDS = 625  # the state of a Mersenne twister: 624 words and the index of the next


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
    """Seed Python's, numpy's and torch's global generators on the CPU; devices are the accelerator's. About 9 us.

    ``torch.manual_seed`` would seed all devices as well and take twenty times as long.
    """
    seed_host(value)
    seed_torch(value)


def seed_host(value: int) -> None:
    """Seed Python's and numpy's global generators alone."""
    random.seed(value)
    if (seed_numpy := _numpy_seed()) is not None:
        seed_numpy(value & _LARGEST_SEED)


seed_torch: Callable[[int], object] = torch.default_generator.manual_seed  # the CPU's alone


@cache
def _numpy_seed() -> Callable[[int], None] | None:
    try:
        import numpy
    except ImportError:
        return None
    return numpy.random.seed


# ------------------------------------------------------------------------------------- has a generator moved?


def _host_mark() -> Callable[[], object]:
    try:
        import numpy

        address, state = _numpy_words(numpy)
    except ImportError:
        address, state = 0, []
    except AttributeError:  # numpy < 1.24
        return object
    inner = random.random.__self__  # type: ignore[attr-defined]
    start = id(inner) + object.__basicsize__
    *key, index = random.getstate()[1]
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + 4 * _WORDS:
        return object
    if not _holds(start, [index, *key]) or (address and not _holds(address, state)):
        return object
    # Each draw moves the index or makes all words anew; those next to the index tell one set of words from another.
    python = (ctypes.c_char * 16).from_address(start)
    if not address:
        return lambda: python.raw
    other = (ctypes.c_char * 12).from_address(address + 4 * (_WORDS - 3))
    return lambda: (python.raw, other.raw)


def _numpy_words(numpy: Any) -> tuple[int, list[int]]:
    """Where numpy's global generator keeps its words and its index, and what they are now."""
    generator = numpy.random.get_bit_generator()
    if generator.state["bit_generator"] != "MT19937":
        raise AttributeError
    state = generator.state["state"]
    return generator.ctypes.state_address, [*state["key"].tolist(), state["pos"]]


def _holds(address: int, words: list[int]) -> bool:
    return list((ctypes.c_uint32 * _WORDS).from_address(address)) == words


# A value that differs from the one before if Python's or numpy's global generator was drawn from or seeded in between.
# Reading the few words costs 0.1 us; the public getstate of both, 40 us, says at import whether they are where they are
# expected. Where they are not, every value differs from every other: the generators then always count as moved.
host_mark: Callable[[], object] = _host_mark()
