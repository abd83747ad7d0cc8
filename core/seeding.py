"""Seeds: every random number of a run follows from the run's seed and a position, so nothing has to be saved.

Reseeding three generators takes a fifth of the time of saving and restoring their states (docs/decisions/0004).
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from .errors import ConfigurationError
from .torch_compat import generator_address

SEED_VARIABLE = "TRIVET_SEED"
_LARGEST_SEED = 2**32 - 1  # numpy's bound
_WORDS = 625  # the state of a Mersenne twister: 624 words and the index of the next
_NEAR = 16  # bytes: the index, or the one after it, and three words


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
    numpy = _numpy()
    return None if numpy is None else numpy.random.seed


def _numpy() -> Any:
    """The module, or None."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


# ------------------------------------------------------------------------------------- has a generator moved?


def _mark() -> Callable[[], bytes]:
    """See `mark`."""
    numpy = _numpy()
    try:
        found = [_torch_words(), _python_words(), *([_numpy_words(numpy)] if numpy is not None else [])]
    except AttributeError:
        return partial(os.urandom, 2 * _NEAR)
    if not all(_holds(start, words) for start, words, _ in found):
        return partial(os.urandom, 2 * _NEAR)
    # Each draw moves the index or makes all words anew; those next to the index tell one set of words from another.
    # A view of the memory is joined quicker than what it is of.
    return partial(b"".join, tuple(memoryview((ctypes.c_char * _NEAR).from_address(near)) for _, _, near in found))


# Where a global generator keeps its words and its index, what they are now, and where the index is with a few words
_Words = tuple[int, list[int], int]


def _python_words() -> _Words:
    inner = random.random.__self__  # type: ignore[attr-defined]
    start = id(inner) + object.__basicsize__
    if sys.implementation.name != "cpython" or random.Random.__basicsize__ < object.__basicsize__ + 4 * _WORDS:
        raise AttributeError
    *key, index = random.getstate()[1]
    return start, [index, *key], start


def _numpy_words(numpy: Any) -> _Words:
    generator = numpy.random.get_bit_generator()  # AttributeError: numpy < 1.24
    if generator.state["bit_generator"] != "MT19937":
        raise AttributeError
    state, start = generator.state["state"], generator.ctypes.state_address
    return start, [*state["key"].tolist(), state["pos"]], start + 4 * (_WORDS - 4)


def _torch_words() -> _Words:
    # The CPU generator's object is longer than its 624 words, so its first 256 bytes can be read.
    generator = torch.default_generator
    state = generator.get_state()
    if len(state) < 24 + 8 * (_WORDS - 1):
        raise AttributeError
    index, *words = state[16 : 24 + 8 * (_WORDS - 1)].view(torch.int64).tolist()
    address, some = generator_address(generator), 8
    begin = b"".join(word.to_bytes(4, sys.byteorder) for word in [index, *words[: some - 1]])
    offset = (ctypes.c_char * 256).from_address(address).raw.find(begin)
    if offset < 0:
        raise AttributeError
    return address + offset, [index, *words], address + offset


def _holds(address: int, words: list[int]) -> bool:
    return list((ctypes.c_uint32 * _WORDS).from_address(address)) == words


# A value that differs from the one before if torch's (of the CPU), Python's or numpy's global generator was drawn from
# or seeded in between; `of_torch` and `of_host` are its parts. Reading the few words costs 0.1 us; the public getstate
# of all three, 50 us, says at import whether they are where they are expected. Where they are not, every value differs
# from every other: the generators then always count as moved.
mark: Callable[[], bytes] = _mark()
of_torch, of_host = slice(_NEAR), slice(_NEAR, None)
