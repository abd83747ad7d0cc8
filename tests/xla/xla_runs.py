"""What the tests of XLA train, and the tasks of their workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trivet.layout import whole

SAVED_AT, UPDATES, SAMPLES, BATCH_SIZE = 3, 6, 40, 8
SHARDED = {"name": "xla-fsdp", "min_size": 8}


class Tied(trivet.Module):
    """Tied weights, a buffer, a scalar and shapes that four devices do not share evenly."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.wide, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.randn(6))
        self.path = path
        self.weights: dict[int, dict[str, Tensor]] = {}  # after each update

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        token, target = batch
        x = self.norm(torch.tanh(self.wide(self.embedding(token) + self.shift)))
        return nn.functional.cross_entropy(self.head(self.scale * x), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def on_update_end(self) -> None:
        update, engine = self.trainer.progress.update, self._attached().engine
        held = engine.strategy.state_dict(engine.module)
        self.weights[update] = {name: whole(tensor).detach().cpu().clone() for name, tensor in held.items()}
        if update == SAVED_AT and self.path is not None:
            self.trainer.save_checkpoint(self.path)


def fit(
    strategy: Any, accelerator: str, devices: int, path: Path | None, origin: Path | None
) -> dict[int, dict[str, Tensor]]:
    """Task: one fit, which saves on its way or goes on from a checkpoint; the weights after each update."""
    tokens = torch.randint(11, (2, SAMPLES), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5 if origin is None else 99)  # the checkpoint's seed rules
    trainer = trivet.Trainer(
        accelerator=accelerator, strategy=strategy, devices=devices, max_steps=UPDATES, logger=False,
        accumulate_grad_batches=2 // devices, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Tied(path)
    trainer.fit(module, DataLoader(TensorDataset(*tokens), BATCH_SIZE // 2, shuffle=True), ckpt_path=origin)
    assert module.head.weight is module.embedding.weight or accelerator == "cpu"
    return module.weights


class Plain(trivet.Module):
    """A small step that logs its loss and reads nothing; what a callback or a test sees of it is read outside."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
        self.width = width

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        if self.width is not None and self.trainer.progress.update >= self.width:
            loss = loss + self.net[0].weight[: self.trainer.progress.update].sum() * 0.0
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(samples: int, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(samples, width, generator=generator) for width in (3, 2)]
    return DataLoader(TensorDataset(*tensors), batch_size)


def trainer(**options: Any) -> trivet.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "xla", "strategy": "single", "devices": 1, "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "max_epochs": 1,
    }  # fmt: skip
    return trivet.Trainer(**{**defaults, **options})


def parts(tensor: Tensor) -> list[tuple[int, ...]]:
    """The shapes in which a tensor lies on the devices; torch_xla shows them of its own kind of tensor alone."""
    from torch_xla.distributed.spmd import XLAShardedTensor

    return [tuple(shard.data.shape) for shard in XLAShardedTensor(tensor).local_shards]


class Sharded(Plain):
    """Wide enough to be cut; notes how its tensors lie after the last update, and what was read before."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))
        self.lie: dict[str, Any] = {}
        self.reads: list[int] = []

    def on_update_end(self) -> None:
        from torch_xla.debug import metrics

        found = metrics.metric_data("TransferFromDeviceTime")
        self.reads.append(found[0] if found else 0)
        if self.trainer.progress.update < 8:
            return
        self.trainer.engine.accelerator.synchronize()
        named, (optimizer,) = dict(self.named_parameters()), self.trainer.engine.optimizers
        self.lie = {name: parts(param) for name, param in named.items()}
        self.lie["state"] = parts(optimizer.state[named["net.0.weight"]]["exp_avg"])
        self.lie["gradient"] = parts(named["net.0.weight"].grad)


def sharded() -> tuple[dict[str, Any], list[int], dict[str, float], str]:
    """Task: one sharded fit: how tensors lie, reads from the device, what was compiled, and what it says of itself."""
    from trivet.accelerators.xla import XLA

    module, device = Sharded(), XLA()
    run = trainer(accelerator=device, strategy={"name": "xla-fsdp", "min_size": 64}, log_every_n_steps=100)
    run.fit(module, loader(40, 5))
    return module.lie, module.reads, device.stats(), run.strategy.laid_out


def afterwards() -> str:
    """Task: a sharded fit in a process that had one device; the refusal."""
    from trivet.errors import ConfigurationError

    trainer().fit(Plain(), loader(8))
    try:
        trainer(strategy="xla-fsdp").fit(Plain(), loader(8))
    except ConfigurationError as error:
        return str(error)
    return ""


def evaluated(path: Path) -> tuple[float, float, dict[str, Any]]:
    """Task: what a checkpoint's weights give in a sharded validation, and in the fit that saved it; how they lie."""

    class Saving(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 2))
            self.lie: dict[str, Any] = {}

        def on_fit_end(self) -> None:
            self.trainer.save_checkpoint(path)

        def on_validation_end(self) -> None:
            self.trainer.engine.accelerator.synchronize()
            self.lie = {name: parts(param) for name, param in self.named_parameters()}

    options = {"strategy": {"name": "xla-fsdp", "min_size": 64}}
    fitted, module = trainer(**options), Saving()
    fitted.fit(Saving(), loader(16), loader(10, 5))
    (found,) = trainer(**options).validate(module, loader(10, 5), ckpt_path=path)
    return found["val"], fitted.callback_metrics["val"], module.lie
