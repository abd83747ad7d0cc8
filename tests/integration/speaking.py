"""Runs in which both ranks print, log and warn, for test_output.py."""

import io
import logging
import sys
import warnings
from pathlib import Path

import torch
import trivet
from torch.utils.data import DataLoader


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        warnings.warn("of a loader's process", RuntimeWarning, stacklevel=1)
        return torch.ones(1)


class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        warnings.warn("of both", stacklevel=1)
        if rank:
            warnings.warn("of one", stacklevel=1)
        print(f"printed by {rank}")
        sys.stdout.writelines([f"\x1b[1;31m\x1b[Kred\x1b[0m\x1b[K of {rank}\n"])  # as grep and gcc colour
        print(f"\x1b[2K\x1b[1Abar of {rank}", end="")
        print(f"\rbar of {rank}", end="")
        logging.getLogger("somebody").warning("logged by %d", rank)
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(root, writes=True):
    """What the terminal of this rank shows, and what the ranks' files hold."""
    before, sys.stderr = sys.stderr, io.StringIO()
    sys.stdout = sys.stderr
    handler = logging.StreamHandler()  # of a script that configured logging before
    logging.getLogger().addHandler(handler)
    try:
        trainer = trivet.Trainer(
            accelerator="cpu", strategy="ddp", devices=2, max_steps=2, default_root_dir=root, enable_progress_bar=False,
            logger=writes, enable_checkpointing=writes,
        )  # fmt: skip
        trainer.fit(Net(), DataLoader(Data(), 1, num_workers=1))
        shown = sys.stderr.getvalue()
        print("after it")
        assert sys.stderr.getvalue() == f"{shown}after it\n"
        assert handler.stream is sys.stderr
    finally:
        logging.getLogger().removeHandler(handler)
        sys.stdout, sys.stderr = sys.__stdout__, before
    files = sorted(Path(root).glob("version_0/logs/*"))
    return shown, {file.name: file.read_text() for file in files if file.name == f"rank_{trainer.global_rank}.log"}
