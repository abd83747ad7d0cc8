"""A context in which new floating tensors have a given dtype."""

from __future__ import annotations

from types import TracebackType

import torch


class DefaultDtype:
    """Sets `torch.set_default_dtype` inside; may be entered again and again, also inside itself.

    The setting is the process's, not the thread's: other threads that create tensors meanwhile see it too.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._outer: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._outer.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.set_default_dtype(self._outer.pop())
