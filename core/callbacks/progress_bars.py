"""RichProgressBar and TQDMProgressBar: `ProgressBar` under Lightning's names, with Lightning's arguments."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError
from .progress import ProgressBar


class RichProgressBar(ProgressBar):
    """The progress bar. It is refreshed by the clock, at most ten times a second, and not every n-th batch.

    Args:
        refresh_rate: 0 shows nothing; any other number is accepted.
        leave: leave the bar of each epoch on the terminal.
        theme: refused: the bar has none.
        console_kwargs: more for `rich.console.Console`.
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        leave: bool = False,
        theme: Any = None,
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if theme is not None:
            raise ConfigurationError(
                "RichProgressBar(theme=...): the bar has no themes. Leave it out; console_kwargs reach rich's Console."
            )
        _checked(type(self).__name__, refresh_rate)
        super().__init__(leave=leave, console_options=console_kwargs)
        self.refresh_rate = refresh_rate
        self.enabled = refresh_rate > 0


class TQDMProgressBar(ProgressBar):
    """The same bar, drawn by rich: tqdm is not needed.

    Args:
        refresh_rate: see `RichProgressBar`.
        process_position: accepted; other bars of the terminal are not known of.
        leave: see `RichProgressBar`.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        _checked(type(self).__name__, refresh_rate)
        super().__init__(leave=leave)
        self.refresh_rate, self.process_position = refresh_rate, process_position
        self.enabled = refresh_rate > 0


def _checked(who: str, refresh_rate: int) -> None:
    if type(refresh_rate) is not int or refresh_rate < 0:
        raise ConfigurationError(f"{who}(refresh_rate={refresh_rate!r}): expected a whole number from 0 up.")
