"""A module and its data for the command line."""

from __future__ import annotations

from typing import Any

import fsdp_runs
import trivet
from torch.utils.data import DataLoader


class Net(fsdp_runs.Net):
    def __init__(self) -> None:
        super().__init__()


class Data(trivet.DataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(fsdp_runs.data(4), 2)
