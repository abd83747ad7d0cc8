"""LightningDataModule: Trivet's DataModule under Lightning's name."""

from __future__ import annotations

from ...data.datamodule import DataModule


class LightningDataModule(DataModule):
    """Prepares data and makes loaders; see `trivet.DataModule`."""
