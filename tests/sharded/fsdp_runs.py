"""The modules that the tests of fsdp train, and the tasks that a pool's workers run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trivet.errors import ConfigurationError, RankFailed
from trivet.layout import sharded, whole

SAMPLES = 26  # with batches of 2: 13 micro-batches, so that the last update is short for 2 and for 4 ranks


class Block(nn.Module):
    """Uneven shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(trivet.Module):
    """Two blocks, one with a frozen part; tied weights, a scalar, a buffer, a parameter that nobody uses."""

    def __init__(
        self, skip: tuple[int, int] | None = None, early: bool = False, thaw: bool = False, odd_rank: int | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.early = early
        self.skip, self.thaw, self.odd_rank = skip, thaw, odd_rank
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].up.requires_grad_(False)
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.never = nn.Parameter(torch.randn(4))
        self.register_buffer("offset", torch.randn(3))
        self.norms: list[float] = []
        self.steps = 0

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        skips = self.skip == (self.global_rank, batch_idx)
        if skips and self.early:
            return None
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return None if skips else ((self.scale * self.head(hidden) + self.offset - y) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.thaw and self.current_epoch == 1 and self.odd_rank in (None, self.global_rank):
            self.layers[1].up.requires_grad_(True)

    def on_update_end(self) -> None:
        if (norm := self.trainer.callback_metrics.get("grad_norm")) is not None:
            self.norms.append(norm)


class Plain(Net):
    """The same without declared blocks."""

    blocks = None  # type: ignore[assignment]


class WideBlock(Block):
    """Weights of 5 x 4 and 4 x 5: two ranks can share one dimension of each evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle(torch.tanh(self.up(x))))


class Wide(Net):
    """`Net` with wider blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([WideBlock(), WideBlock()])
        self.layers[1].up.requires_grad_(False)


def other_dimension(param: nn.Parameter) -> Shard | None:
    """A placement of one's own: matrices by columns, where two ranks can."""
    return Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None


@dataclass
class Outcome:
    """What one rank saw."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    laid_out: str = ""
    held: dict[str, int] = field(default_factory=dict)  # elements of parameters on this rank
    updates: int = 0
    skipped: int = 0
    placements: set[str] = field(default_factory=set)
    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the dimensions that are sharded


def dims(tensor: Any) -> tuple[int, ...]:
    return tuple(place.dim for place in tensor.placements if place.is_shard())


class Look(trivet.Callback):
    """Looks at the end, while parameters are sharded."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def on_train_end(self, trainer: trivet.Trainer, module: trivet.Module) -> None:
        one = self.outcome
        params = dict(module.named_parameters())
        one.weights = {name: whole(t.detach()).clone() for name, t in module.state_dict().items()}
        states = trainer.optimizers[0].state
        buffers = {
            n: states[p].get("momentum_buffer", states[p].get("exp_avg")) for n, p in params.items() if p in states
        }
        one.moments = {n: whole(t).clone() for n, t in buffers.items() if t is not None}
        shards = {n: sharded(p) for n, p in params.items()}
        one.held = {n: params[n].numel() if s is None else s.to_local().numel() for n, s in shards.items()}
        one.placements = {str(tuple(s.placements)) for s in shards.values() if s is not None}
        one.cut = {n: dims(s) for n, s in shards.items() if s is not None}
        one.laid_out = trainer.strategy.laid_out
        one.updates, one.skipped = trainer.progress.update, trainer.progress.skipped


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 3, generator=generator), torch.randn(samples, 3, generator=generator))


def trainer(strategy: Any, world_size: int | str, **options: Any) -> trivet.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
    return trivet.Trainer(accelerator="cpu", strategy=strategy, devices=world_size, **{**quiet, **options})


def fit(
    strategy: Any, world_size: int, net: dict[str, Any] | None = None, options: dict[str, Any] | None = None,
    kind: type[Net] = Net, save: Path | None = None, resume: Path | None = None,
) -> Outcome:  # fmt: skip
    """Task: one fit; afterwards the module must be whole and plain, with the trained weights."""
    module, look = kind(**(net or {})), Look()
    callbacks: list[trivet.Callback] = [look, *([Saver(save)] if save else [])]
    runner = trainer(strategy, world_size, callbacks=callbacks, **(options or {}))
    runner.fit(module, DataLoader(data(), 2), ckpt_path=resume)
    look.outcome.norms = module.norms
    assert type(module.layers[0]) in (Block, WideBlock)
    for name, tensor in module.state_dict().items():
        assert sharded(tensor) is None
        assert torch.equal(tensor, look.outcome.weights[name]), name
    assert module.head.weight is module.embed.weight
    with torch.no_grad():
        module.layers[0](torch.zeros(1, 3))
    return look.outcome


def fit_compiled(strategy: Any, world_size: int) -> Outcome:
    """Task: `fit`, where torch's compiler warns of torch's own past."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(strategy, world_size)


class Saver(trivet.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: trivet.Trainer, module: trivet.Module) -> None:
        trainer.save_checkpoint(self.path)


def fit_twice(strategy: Any, world_size: int) -> list[dict[str, Tensor]]:
    """Task: the same module is fitted, validated and fitted again."""
    module = Net()
    states = []
    for _ in range(2):
        trainer(strategy, world_size, max_epochs=1).fit(module, DataLoader(data(), 2))
        states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    return states


# ------------------------------------------------------------------------------------------------------ evaluation


class Numbers(Dataset[Tensor]):
    """Sample i is the number i."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Counting(trivet.Module):
    """Averages the samples that it sees in validation, and counts them in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[float] = []
        self.ended = 0
        self.forwards = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean() * 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.forwards += 1
        self.count = self.count + len(batch)
        assert self.layer(batch).shape == batch.shape
        self.log("mean", batch.mean())
        return batch

    def on_validation_batch_end(self, outputs: Tensor, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ended += 1
        self.seen += batch.flatten().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluate(world_size: int, batch_size: int) -> tuple[float, list[float], int, int, float]:
    """Task: what a rank saw in one validation."""
    module, calls = Counting(), []
    module.layer.register_forward_hook(lambda *args: calls.append(1))  # the module's own counter forgets borrowed ones
    metrics = trainer("fsdp", world_size).validate(module, DataLoader(Numbers(), batch_size))
    assert module.forwards == module.ended
    return metrics[0]["mean"], module.seen, module.ended, len(calls), float(module.count)


def fit_and_validate(world_size: int) -> list[float]:
    """Task: the sanity check and validation in the epoch, with uneven numbers of batches."""
    module = Counting()
    trainer("fsdp", world_size, num_sanity_val_steps=2).fit(module, DataLoader(Numbers(), 1), DataLoader(Numbers(), 1))
    return module.seen


# ----------------------------------------------------------------------------------------------- full parameters


class Reader(Net):
    """Reads, and then changes, whole parameters between updates."""

    def __init__(self, writeback: bool) -> None:
        super().__init__()
        self.writeback = writeback
        self.read: list[tuple[Tensor, Tensor]] = []

    def on_train_epoch_end(self) -> None:
        before = whole(self.layers[0].up.weight.detach())
        with self.trainer.full_parameters(writeback=self.writeback):
            weight = self.layers[0].up.weight
            assert sharded(weight) is None
            assert self.head.weight is self.embed.weight
            self.read.append((before, weight.detach().clone()))
            with torch.no_grad():
                weight.fill_(3.0 + self.global_rank)
        self.read.append((before, whole(self.layers[0].up.weight.detach())))


def read_full(world_size: int, writeback: bool) -> list[tuple[Tensor, Tensor]]:
    module = Reader(writeback)
    trainer("fsdp", world_size, max_epochs=1).fit(module, DataLoader(data(), 2))
    return module.read


# ---------------------------------------------------------------------------------------------------------- meta


class Unset(nn.Module):
    """Has a parameter and no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Large(trivet.Module):
    """Builds its layers in configure_model."""

    def __init__(self, unset: bool = False) -> None:
        super().__init__()
        self.unset = unset
        self.device_types: set[str] = set()

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.end: nn.Module = Unset() if self.unset else nn.LayerNorm(3)
        self.device_types = {param.device.type for param in self.parameters()}

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return ((self.end(x) - y) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit_meta(
    strategy: Any, world_size: int, options: dict[str, Any], resume: Path | None = None, save: Path | None = None,
    unset: bool = False,
) -> tuple[set[str], dict[str, Tensor]]:  # fmt: skip
    """Task: where the layers were built, and the weights at the end."""
    module, look = Large(unset), Look()
    callbacks: list[trivet.Callback] = [look, *([Saver(save)] if save else [])]
    runner = trainer(strategy, world_size, callbacks=callbacks, **options)
    runner.fit(module, DataLoader(data(), 2), ckpt_path=resume)
    return module.device_types, look.outcome.weights


# ------------------------------------------------------------------------------------------------------ refusals


class Past(Net):
    """Uses a block's layer past the block."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers[0].up(batch[0]).mean()


class Early(Net):
    """Builds its optimizer before parameters are sharded."""

    def setup(self, stage: str) -> None:
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


def refused(kind: type[Net], world_size: int, strategy: Any = "fsdp") -> str:
    """Task: the message of the refusal."""
    try:
        trainer(strategy, world_size).fit(kind(), DataLoader(data(), 2))
    except (ConfigurationError, RankFailed) as error:  # of its own, or of the rank that was faster
        return str(error)
    return "nothing was refused"


# -------------------------------------------------------------------------------------------------------- runtime


def runtime_loop(runtime: trivet.Runtime) -> dict[str, Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    model, optimizer = runtime.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    for x, y in runtime.setup_dataloader(DataLoader(data(24), 4 // runtime.world.world_size)):
        optimizer.zero_grad()
        runtime.backward(((model(x) - y) ** 2).mean())
        runtime.clip(optimizer, 0.5)
        optimizer.step()
    with torch.no_grad():
        assert model(x).shape == x.shape
    return {name: whole(t.detach()).clone() for name, t in model.state_dict().items()}


def in_runtime(strategy: Any, world_size: int) -> dict[str, Tensor]:
    """Task: a loop of one's own."""
    result: dict[str, Tensor] = trivet.Runtime(strategy=strategy, devices=world_size, accelerator="cpu").launch(
        runtime_loop
    )
    return result


# --------------------------------------------------------------------------------------------------------- memory

LAYERS, WIDTH = 31, 2048  # 520 MB in float32


class Big(trivet.Module):
    """Measures the memory of its process from before it is built until training starts."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def configure_model(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("nothing is trained here")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self.peak = memory("VmHWM")


def memory(field: str) -> int:
    """Bytes of this process: resident now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def build(strategy: Any, world_size: int, resume: Path | None = None, save: Path | None = None) -> float:
    """Task: the most memory that building and loading took, as a part of the model's size."""
    fit(strategy, world_size)  # what is imported and opened once does not count
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = memory("VmRSS")
    module = Big()
    callbacks: list[trivet.Callback] = [Saver(save)] if save else []
    trainer(strategy, world_size, max_steps=0, callbacks=callbacks).fit(module, DataLoader(data(), 2), ckpt_path=resume)
    return (module.peak - before) / (LAYERS * WIDTH * WIDTH * 4)
