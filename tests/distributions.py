"""What tests of plugins from other distributions share; the fixture `install` writes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Install = Callable[..., Path]

GOOD = """
    import torch
    from trivet.plugins import Policy, Precision

    class Good(Precision):
        def __init__(self, *, width: int = 8, depth: int = 2) -> None:
            self.width, self.depth = width, depth

        @property
        def policy(self) -> Policy:
            return Policy()
"""
