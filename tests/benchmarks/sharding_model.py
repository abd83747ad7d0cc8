"""The model that `sharding.py` trains, and its sharded training in plain PyTorch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from trivet.strategies.slices import all_gather, reduce_scatter

INPUT, WIDTH, HIDDEN, OUTPUT = 101, 243, 1021, 643  # odd, so that nothing divides by the number of ranks
LEARNING_RATE = 1e-3


class LowRank(nn.Module):
    """A linear layer with a correction of low rank beside it (Hu et al. 2021)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.full = nn.Linear(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.full(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.up = LowRank(width, hidden, rank) if rank else nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Body(nn.Module):
    """Of 4.7 MB. With ``rank``, two layers have a low-rank correction, and where ``frozen`` nothing else is trained.

    With ``even``, all numbers of rows divide by four.
    """

    def __init__(self, rank: int = 0, frozen: bool = False, even: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, hidden, output = (-(-size // 4) * 4 if even else size for size in (WIDTH, HIDDEN, OUTPUT))
        self.first = nn.Linear(INPUT, width)
        self.layers = nn.ModuleList([Block(width, hidden, rank), Block(width, hidden, rank)])
        self.last = nn.Linear(width, output)
        if frozen:
            self.requires_grad_(False)
            for part in self.modules():
                if isinstance(part, LowRank):
                    part.up.requires_grad_(True)
                    part.down.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)[:, :OUTPUT]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=LEARNING_RATE)


class ByHand:
    """Plain PyTorch, as one writes it for this model alone: ``step`` trains on one batch."""

    def __init__(self) -> None:
        self.net = Body()
        self.model, self.optimizer = self.lay_out()

    def lay_out(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The module to call and its optimizer."""
        return DistributedDataParallel(self.net, gradient_as_bucket_view=True), adamw(self.net)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        mse_loss(self.model(x), y).backward()
        self.update()

    def update(self) -> None:
        self.optimizer.step()


class FSDPByHand(ByHand):
    keep: bool | None = None

    def lay_out(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        for layer in self.net.layers:
            fully_shard(layer, reshard_after_forward=self.keep)
        return fully_shard(self.net, reshard_after_forward=self.keep), adamw(self.net)


class Zero3ByHand(FSDPByHand):
    keep = True


class ZeroByHand(ByHand):
    """Parameters are views into one vector, of which the optimizer trains this rank's slice."""

    def lay_out(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.params = list(self.net.parameters())
        elements, ranks = sum(p.numel() for p in self.params), dist.get_world_size()
        length = -(-elements // ranks)
        self.padding = torch.zeros(length * ranks - elements)
        self.vector = torch.cat([*(p.detach().reshape(-1) for p in self.params), self.padding])
        start = 0
        for param in self.params:
            param.data = self.vector[start : start + param.numel()].view(param.shape)
            start += param.numel()
        rank = dist.get_rank()
        self.mine = nn.Parameter(self.vector[rank * length : (rank + 1) * length].clone())
        self.mine.grad = torch.empty_like(self.mine)
        return self.net, torch.optim.AdamW([self.mine], lr=LEARNING_RATE)

    def step(self, x: Tensor, y: Tensor) -> None:
        for param in self.params:
            param.grad = None
        mse_loss(self.model(x), y).backward()
        self.update()

    def update(self) -> None:
        grads = torch.cat([*(p.grad.reshape(-1) for p in self.params if p.grad is not None), self.padding])
        grads /= dist.get_world_size()
        reduce_scatter(self.mine.grad, grads)
        self.optimizer.step()
        all_gather(self.vector, self.mine.detach())


# zero2 with one bucket and one micro-batch does what zero1 does
BY_HAND: dict[str, type[ByHand]] = {
    "ddp": ByHand, "zero1": ZeroByHand, "zero2": ZeroByHand, "zero3": Zero3ByHand, "fsdp": FSDPByHand,
}  # fmt: skip
