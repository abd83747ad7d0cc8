"""What `sharding.py` measures: what a rank holds and sends, and how long a step takes.

The functions at the end run on every rank of a pool. They return plain data.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
import trivet
from sharding_model import BY_HAND, INPUT, OUTPUT, Body, ByHand, adamw
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, Subset
from trivet import registry
from trivet.layout import sharded, whole

Batch = tuple[Tensor, Tensor]


# ------------------------------------------------------------------------------------------------------------ training


class Net(trivet.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = Body(**options)

    def blocks(self) -> list[nn.Module]:
        return list(self.body.layers)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return mse_loss(self.body(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class Batches(Dataset[Batch]):
    """A few batches in memory, used in turn."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(32, INPUT, generator=generator), torch.randn(32, OUTPUT, generator=generator))
            for _ in range(16)
        ]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index % len(self.batches)]


def train(
    strategy: Any, world_size: int, callback: trivet.Callback, *, steps: int, net: Any = None, **flags: Any
) -> None:
    """``steps`` updates with everything off that can be off."""
    flags = {"accumulate_grad_batches": 1, "logger": False, "enable_checkpointing": False, **flags}
    trainer = trivet.Trainer(
        accelerator="cpu", strategy=strategy, devices=world_size, max_steps=steps, enable_progress_bar=False,
        callbacks=[callback], return_weights=False, **flags,
    )  # fmt: skip
    data = Batches(steps * world_size * flags["accumulate_grad_batches"])
    trainer.fit(Net(**(net or {})), DataLoader(data, batch_size=None))


# --------------------------------------------------------------------------------------------------- what a rank holds


def storages(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """The memory behind the parts of these tensors that this rank holds, each once, by address."""
    found = {}
    for tensor in tensors:
        part = tensor if (shard := sharded(tensor.detach())) is None else shard.to_local()
        if part.dim() and part.is_floating_point():  # no losses, and no counters of steps
            memory = part.untyped_storage()
            found[memory.data_ptr()] = memory
    return found


def size(tensors: Iterable[Tensor]) -> int:
    return sum(memory.nbytes() for memory in storages(tensors).values())


def live() -> Iterator[Tensor]:
    """All tensors that Python can reach in this process, with their gradients, whoever holds them."""
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), Tensor):
            yield found
            if found.is_leaf and found.grad is not None:
                yield found.grad


class Held(trivet.Callback):
    """Looks into the second update, of two micro-batches. Gradients are what is there and was not before its forward:
    after its last backward, and between the two.

    So they are found wherever a strategy keeps them; ``param.grad`` shows only some.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.before: dict[int, Any] = {}  # keeps the memory too, so that no address is given away again

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 and not self.before:
            self.before = storages(live())

    def new(self) -> int:
        return sum(memory.nbytes() for at, memory in storages(live()).items() if at not in self.before)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.before:
            self.bytes.setdefault("gradients between micro-batches", self.new())

    def watched(self, name: str) -> Any:
        """The strategy, which looks before its step."""
        strategy = registry.make("strategy", name).plugin
        step = strategy.optimizer_step

        def looked(*args: Any, **options: Any) -> Any:
            self.bytes["gradients"] = self.new()
            return step(*args, **options)

        strategy.optimizer_step = looked
        return strategy

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.bytes["parameters"] = size(module.parameters())
        states = trainer.optimizers[0].state.values()
        self.bytes["optimizer state"] = size(v for state in states for v in state.values() if isinstance(v, Tensor))


# --------------------------------------------------------------------------------------------------- what a rank sends


class Payload(TorchDispatchMode):
    """Counts the bytes of every collective: of the whole vector that is reduced, scattered, gathered or sent.

    Whoever starts one, DDP's reducer in C++, FSDP2 or Python, goes through an operator of the namespace ``c10d``.
    """

    KINDS = {  # noqa: RUF012
        "allreduce_": "all-reduce", "allreduce_coalesced_": "all-reduce",
        "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter",
        "alltoall_base_": "reduce-scatter",  # of which zero makes one on gloo
        "_allgather_base_": "all-gather", "allgather_": "all-gather",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            tensors = [t for arg in args for t in _tensors(arg)]
            self.bytes[self.KINDS.get(name, name)] += max((t.numel() * t.element_size() for t in tensors), default=0)
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


class Sent(trivet.Callback):
    """The collectives of the last update alone."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.bytes: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.payload.bytes.clear()

    def on_update_end(self, trainer: Any, module: Any) -> None:
        self.bytes = dict(self.payload.bytes)


class Norms(trivet.Callback):
    """What was logged as the norm of the gradients, in each update."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_update_end(self, trainer: Any, module: Any) -> None:
        self.norms.append(trainer.callback_metrics["grad_norm"])


# --------------------------------------------------------------------------------------------- how long a step takes


class Race(trivet.Callback):
    """Between two updates of Trivet, two loops by hand take one step each on the same batch, in an order that turns."""

    def __init__(self, make: Callable[[], ByHand], steps: int) -> None:
        self.make, self.steps = make, steps
        self.times: dict[str, list[tuple[float, float]]] = {"trivet": [], "by hand": [], "by hand again": []}
        self.since: tuple[float, float] | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        count, ranks = self.steps, trainer.world_size
        self.hands = {name: self.make() for name in ("by hand", "by hand again")}
        mine = Subset(Batches(count * ranks), range(trainer.global_rank, count * ranks, ranks))
        self.loaders = {name: iter(DataLoader(mine, batch_size=None)) for name in self.hands}

    def on_update_end(self, trainer: Any, module: Any) -> None:
        self.stop("trivet")
        for name in list(self.hands)[:: 1 if trainer.global_step % 2 else -1]:
            self.since = clocks()
            self.hands[name].step(*next(self.loaders[name]))
            self.stop(name)
        self.since = clocks()

    def stop(self, name: str) -> None:
        now = clocks()
        if self.since is not None:
            self.times[name].append((now[0] - self.since[0], now[1] - self.since[1]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        for name, other in self.hands["by hand"].net.named_parameters():
            ours, theirs = whole(module.body.get_parameter(name).detach()), whole(other.detach())
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=f"{name}: other weights than by hand")
        del self.hands


def clocks() -> tuple[float, float]:
    """Seconds by the wall, and of this process on all cores."""
    return time.perf_counter(), time.process_time()


# --------------------------------------------------------------------------------------------------------------- tasks


def held(strategy: str, world_size: int) -> dict[str, int]:
    """Task: bytes on this rank."""
    look = Held()
    train(look.watched(strategy), world_size, look, steps=2, accumulate_grad_batches=2)
    return look.bytes


def sent(strategy: str, world_size: int, net: dict[str, Any]) -> dict[str, int]:
    """Task: bytes of the collectives of the third update, by kind."""
    with Payload() as payload:
        look = Sent(payload)
        train(strategy, world_size, look, steps=3, net=net)
    return look.bytes


def norms(strategy: str, world_size: int, clip: float, accumulate: int) -> list[float]:
    """Task: the norm that was logged in each of three updates."""
    look = Norms()
    train(strategy, world_size, look, steps=3, gradient_clip_val=clip, accumulate_grad_batches=accumulate)
    return look.norms


def race(strategy: str, world_size: int, steps: int) -> dict[str, tuple[float, float]]:
    """Task: median seconds of a step by both `clocks`, after the first fifth of the steps."""
    torch.set_num_threads(1)
    look = Race(BY_HAND[strategy], steps)
    train(strategy, world_size, look, steps=steps)
    wall, cpu = ({k: median(t[i] for t in times[steps // 5 :]) for k, times in look.times.items()} for i in (0, 1))
    return {name: (wall[name], cpu[name]) for name in wall}
