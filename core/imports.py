"""Imports of what stays for good, without looking for garbage in it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Around the first import of torch, in a program of Trivet's own.

    Python's collector would walk all that is there each time that it has grown by a quarter. Afterwards what was
    imported is no longer looked at: importing torch and what DDP needs takes 2.2 s instead of 3.0 s, and each full
    collection of the run a few milliseconds instead of a hundred. Where torch is loaded already, the process is
    somebody else's, and nothing is changed.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
