"""How long it takes until two processes have made their first update, beside a raw torchrun script and Lightning.

    OMP_NUM_THREADS=1 python tests/benchmarks/startup.py --rounds 11
    OMP_NUM_THREADS=1 python tests/benchmarks/startup.py --rounds 11 --write docs/running/index.md

Each contender trains the same tiny model with DDP on two CPU processes, from a command line. The clock runs from the
moment the command is given to the moment rank 0's first optimizer step is done; CPU seconds are those of all processes
until the end. Contenders take turns in each round, in an order that turns too, and what counts is the ratio to the raw
script of the same round; its median is shown, with the quarter points. "torchrun again" is the raw script once more, so
its ratio is the noise. Lightning runs with the Python that TRIVET_LIGHTNING_PYTHON names, if any. The first round fills
the caches and is dropped.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pages

RAW = """
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        open("first", "w").write(str(time.time()))
    break
dist.barrier()
dist.destroy_process_group()
"""
MODULE = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{imports}

class Net({base}):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4, shuffle=True)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.is_global_zero:
            open("first", "w").write(str(time.time()))
{end}
"""
LIGHTNING = """
if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net())
"""
AGENT = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FIT = ["-m", "trivet", "fit", "--model", "net.Net", "--accelerator", "cpu", "--strategy", "ddp", "--max_steps", "1",
       "--logger", "false", "--enable_checkpointing", "false", "--enable_progress_bar", "false"]  # fmt: skip


def commands() -> dict[str, list[str]]:
    found = {
        "torchrun": [sys.executable, *AGENT, "raw.py"],
        "torchrun again": [sys.executable, *AGENT, "raw.py"],
        "trivet fit": [sys.executable, *FIT, "--devices", "2"],
        "torchrun -m trivet fit": [sys.executable, *AGENT, *FIT],
    }
    if lightning := os.environ.get("TRIVET_LIGHTNING_PYTHON"):
        found["Lightning"] = [lightning, "lightning_net.py"]
    return found


class Spent(NamedTuple):
    """Seconds of one start."""

    wall: float
    cpu: float


def seconds(command: list[str], folder: Path, *, again: bool = True) -> Spent:
    first = folder / "first"
    first.unlink(missing_ok=True)
    begin, used = time.time(), cpu_seconds()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        if again and "raw.py" in command:  # torch's threads can abort a process that is done
            return seconds(command, folder, again=False)
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return Spent(float(first.read_text()) - begin, cpu_seconds() - used)


def cpu_seconds() -> float:
    """What processes that have ended used, with those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(rounds: int) -> dict[str, list[Spent]]:
    """Seconds of each contender by round."""
    found: dict[str, list[Spent]] = {name: [] for name in commands()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "raw.py").write_text(RAW)
        (folder / "net.py").write_text(MODULE.format(imports="import trivet", base="trivet.Module", end=""))
        lightning = MODULE.format(imports="import pytorch_lightning as pl", base="pl.LightningModule", end=LIGHTNING)
        (folder / "lightning_net.py").write_text(lightning)
        for number in range(rounds + 1):
            order = list(commands().items())
            turn = number % len(order)
            for contender, command in order[turn:] + order[:turn]:
                spent = seconds(command, folder)
                if number:
                    found[contender].append(spent)
    return found


def table(found: dict[str, list[Spent]]) -> str:
    lines = ["| started by | seconds to the first update | beside torchrun | CPU seconds | beside torchrun |"]
    lines.append("|---|---|---|---|---|")
    for name, spent in found.items():
        cells = [name]
        for one, raw in zip(zip(*spent, strict=True), zip(*found["torchrun"], strict=True), strict=True):
            ratios = [mine / its for mine, its in zip(one, raw, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
            range_ = "" if name == "torchrun" else f" ({low:.2f} to {high:.2f})"
            cells += [f"{statistics.median(one):.2f}", f"{middle:.2f}{range_}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = pages.parser(__doc__, 11).parse_args()
    text = table(measure(options.rounds))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = f"{options.rounds} rounds on {time.strftime('%Y-%m-%d')} at {commit}, torch {version('torch')}, "
    about += f"{os.cpu_count()} cores. Seconds are of that machine; the ratios are medians over rounds."
    pages.show(f"{text}\n\n{about}", options.write, "<!-- startup -->", "<!-- /startup -->")


if __name__ == "__main__":
    main()
