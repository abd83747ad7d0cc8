"""What a training step costs beside a plain PyTorch loop, and beside Lightning's where it is installed.

    pip install -e '.[peers]'
    OMP_NUM_THREADS=1 taskset -c 0 python tests/benchmarks/overhead.py --rounds 9 --steps 2000

Everything that can be off is off: logger, bar, checkpoint, validation. All contenders train the same tiny model on the
same batches in one process, round by round, in an order that turns; the first round warms up and is dropped. The clock
is read in one place for all, when a batch is asked for, and the median gap between two batches counts. Overhead is the
difference to the plain loop of the same round; "plain again" is that loop once more, so its overhead is the noise.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import trivet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]


class Batches(Dataset[Batch]):
    """A few batches in memory, used in turn; ``times`` says when each was asked for."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(8, 32, generator=generator), torch.randint(0, 2, (8,), generator=generator)) for _ in range(16)
        ]
        self.steps = steps
        self.times: list[float] = []

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Batch:
        self.times.append(time.perf_counter())
        return self.batches[index % len(self.batches)]


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 2)


def plain(loader: DataLoader[Batch]) -> nn.Module:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def module(base: type) -> nn.Module:
    """The same training as a module of a library."""

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x, y = batch
            return cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Net()


def with_trivet(loader: DataLoader[Batch]) -> nn.Module:
    net = module(trivet.Module)
    trainer = trivet.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(net, loader)  # type: ignore[arg-type]
    return net.net  # type: ignore[return-value]


def with_lightning(loader: DataLoader[Batch]) -> nn.Module:
    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    net = module(lightning.LightningModule)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, loader)  # type: ignore[arg-type]
    return net.net  # type: ignore[return-value]


def measure(train: Callable[[DataLoader[Batch]], nn.Module], steps: int) -> tuple[float, nn.Module]:
    """The median gap between two batches in microseconds, after the first tenth of them."""
    data = Batches(steps)
    gc.collect()
    net = train(DataLoader(data, batch_size=None))
    times = data.times[steps // 10 :]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) * 1e6, net


def rounds(
    contenders: dict[str, Callable[[DataLoader[Batch]], nn.Module]], *, steps: int, count: int
) -> Iterator[dict[str, float]]:
    """The gaps of each round by contender. All of them have to end with the plain loop's weights, to the bit."""
    names = list(contenders)
    for number in range(count + 1):
        turn = number % len(names)
        gaps, weights = {}, {}
        for name in names[turn:] + names[:turn]:
            gaps[name], net = measure(contenders[name], steps)
            weights[name] = net.weight
        for name in names:
            if not torch.equal(weights[name], weights["plain"]):
                raise AssertionError(f"{name} trained to other weights than the plain loop")
        if number:
            yield gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    contenders = {"plain": plain, "plain again": plain, "trivet": with_trivet}
    if importlib.util.find_spec("pytorch_lightning"):
        contenders["lightning"] = with_lightning
    else:
        print("Lightning is not installed (pip install -e '.[peers]'), so it is left out.")
    found = list(rounds(contenders, steps=options.steps, count=options.rounds))
    print(f"torch {torch.__version__}, {options.rounds} rounds of {options.steps} steps; microseconds a step")
    print(f"{'':12}{'median gap':>12}{'overhead':>12}{'lowest':>10}{'highest':>10}")
    for name in contenders:
        over = [gaps[name] - gaps["plain"] for gaps in found]
        gap = statistics.median(gaps[name] for gaps in found)
        print(f"{name:12}{gap:12.1f}{statistics.median(over):12.1f}{min(over):10.1f}{max(over):10.1f}")


if __name__ == "__main__":
    main()
