"""What a step costs on two processes with DDP, beside the script by hand and other trainers.

    OMP_NUM_THREADS=1 python tests/benchmarks/pairs.py --write docs/performance.md

All contenders train the tiny model of `speed.py` on the same batches in the same two processes, round by round in an
order that turns, and end with the same weights. A step is the median time from one batch to the next on rank 0; shown
are medians over rounds, and of the ratio and the difference to the script by hand of the same round. "plain again" is
that script once more. Peers that are not installed are left out.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import speed_report
import speed_tasks as tasks
import torch
import torch.distributed as dist
from speed_tasks import Task
from torch import nn
from torch.utils.data import DataLoader, Subset

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ranks import Pool, free_port

START, END = "<!-- pairs: begin -->", "<!-- pairs: end -->"
PEERS = {"plain": "torch", "plain again": "torch", "trivet": "trivet", "fabric": "lightning_fabric",
         "accelerate": "accelerate", "lightning": "pytorch_lightning"}  # fmt: skip


def own(task: Task) -> DataLoader[Any]:
    """This rank's batches: every second one, as Trivet deals them."""
    loader = task.loader()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return DataLoader(Subset(loader.dataset, range(rank, task.steps, size)), batch_size=None)


def plain(task: Task) -> nn.Module:
    dist.init_process_group("gloo")
    model = task.model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = task.optimizer(model.parameters())
    for x, y in own(task):
        optimizer.zero_grad()
        task.loss(wrapped(x), y).backward()
        optimizer.step()
    del wrapped
    dist.destroy_process_group()
    return model


def trivet(task: Task) -> nn.Module:
    from contenders.trivet import Net
    from trivet import Trainer

    net = Net(task, 0, False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(net, task.loader())
    return net.net


def fabric(task: Task) -> nn.Module:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = task.model()
    model, optimizer = fabric.setup(net, task.optimizer(net.parameters()))
    loader = fabric.setup_dataloaders(own(task), use_distributed_sampler=False)
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(task.loss(model(x), y))
        optimizer.step()
    del model
    dist.destroy_process_group()
    return net


def accelerate(task: Task) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    net = task.model()
    model, optimizer = accelerator.prepare(net, task.optimizer(net.parameters()))
    for x, y in own(task):  # whose batches are this rank's already
        optimizer.zero_grad()
        accelerator.backward(task.loss(model(x), y))
        optimizer.step()
    del model
    PartialState().destroy_process_group()
    AcceleratorState._reset_state(True)
    return net


def lightning(task: Task) -> nn.Module:
    import pytorch_lightning as pl
    from contenders.lightning import Net

    net = Net(task, 0, False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(net, own(task))
    dist.destroy_process_group()
    return net.net


FITS: dict[str, Callable[[Task], nn.Module]] = {
    "plain": plain, "plain again": plain, "trivet": trivet, "fabric": fabric, "accelerate": accelerate,
    "lightning": lightning,
}  # fmt: skip


def step_of(name: str, steps: int, variables: dict[str, str]) -> tuple[float, list[torch.Tensor]]:
    """Task: microseconds of a step of a contender, and the weights that it ends with."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    task = tasks.tiny(2 * steps)
    model = FITS[name](task)
    assert task.data is not None
    times = task.data.times[steps // 10 :]
    gaps = [(after - before) * 1e6 for before, after in itertools.pairwise(times)]
    return statistics.median(gaps), [parameter.detach().clone() for parameter in model.parameters()]


def measure(names: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in names}
    pool = Pool(2)
    try:
        for number in range(rounds + 1):
            turn, weights = number % len(names), {}
            for name in names[turn:] + names[:turn]:
                # a port that nobody had, and what Lightning takes away
                outcomes = pool.run(step_of, name, steps, {"MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"})
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
                median, weights[name] = outcomes[0]
                if number:
                    found[name].append(median)
            for name, tensors in weights.items():
                if not all(map(torch.equal, tensors, weights["plain"])):
                    raise SystemExit(f"{name} ended with other weights than the script by hand")
    finally:
        pool.close()
    return found


def main() -> None:
    parser = pages.parser(__doc__, 11)
    parser.add_argument("--contenders", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    given = dict.fromkeys(["plain", "plain again", *options.contenders])
    names = [name for name in given if importlib.util.find_spec(PEERS[name]) is not None]
    found = measure(names, options.rounds, options.steps)
    rounds = {name: [{"median": value} for value in values] for name, values in found.items()}
    import speed

    rows = speed_report.table(speed.summary(rounds), "median")
    about = speed_report.about("pairs.py", [PEERS[name] for name in names], options.rounds, os.getloadavg()[:1])
    text = f'{about} Two processes, gloo. "plain again" is the noise.\n\n{rows}'
    pages.show(text, options.write, START, END)


if __name__ == "__main__":
    main()
