"""A model of which one rank fails in a way and at a moment that its arguments say. What failure_table.py runs."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import trivet
from torch import nn
from torch.utils.data import DataLoader


def fail(kind):
    Path(os.environ["NOTES"], "failed-at").write_text(str(time.time()))
    if kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    if kind in ("raise", "teardown", "save"):
        raise ValueError("boom")
    if kind == "sys.exit":
        sys.exit(3)
    if kind == "exit 3":
        os._exit(3)
    if kind == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    if kind == "hang in C":
        import ctypes

        ctypes.PyDLL(None).sleep(1000)  # which keeps the interpreter to itself
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)  # nor does it run on when it is sent SIGTERM
    if kind == "collective":
        torch.distributed.barrier()  # on this rank alone
    if kind == "guard":
        alone()
    raise AssertionError(f"{kind!r} did not fail")


@trivet.rank_zero
def alone():
    torch.distributed.all_reduce(torch.ones(1))


class Failing(trivet.Module):
    """``kind``, on that ``rank``, at the third batch or where the kind says."""

    def __init__(self, kind: str = "", rank: int = 1):
        super().__init__()
        self.kind, self.rank = kind, rank
        self.layer = nn.Linear(1, 1)

    def fail(self, *kinds):
        if self.kind in kinds and int(os.environ["RANK"]) == self.rank:
            fail(self.kind)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.fail(
                "raise", "sys.exit", "exit 3", "kill -9", "hang", "hang in C", "stop", "oom", "collective", "guard"
            )
        return self.layer(batch).mean()

    def on_save_checkpoint(self, checkpoint):
        self.fail("save")

    def on_exception(self, exception):
        Path(os.environ["NOTES"], f"on_exception-{os.environ['RANK']}").write_text(str(exception))

    def teardown(self, stage):
        Path(os.environ["NOTES"], f"teardown-{os.environ['RANK']}").touch()
        self.fail("teardown")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(12, 1), 1)


if __name__ == "__main__":
    trivet.cli(Failing)
