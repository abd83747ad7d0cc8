"""Limits: when to stop and when to validate, as the flags say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Limits:
    """When to stop and when to validate; what the flags of those names say. None means no limit."""

    max_epochs: int | None = None
    min_epochs: int = 0
    max_steps: int | None = None
    min_steps: int = 0
    max_seconds: float | None = None
    # one of these three, or none: at the end of an epoch
    val_every_batches: int | None = None
    val_every_updates: int | None = None
    val_every_seconds: float | None = None
    val_every_epochs: int = 1
    val_across_epochs: bool = False  # whether ``val_every_batches`` counts on from epoch to epoch
    sanity_batches: int = 0
    log_every: int = 50
    by_default: bool = False  # whether ``max_epochs`` is ours, because nobody gave a limit

    @property
    def val_within_epoch(self) -> bool:
        return (self.val_every_batches or self.val_every_updates or self.val_every_seconds) is not None
