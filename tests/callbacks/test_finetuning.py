"""Layers that are frozen and unfrozen while a run goes on, under every layout, and over a resume."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from callback_runs import Net, loader, trainer
from ranks import run
from torch import nn
from trivet.callbacks import BackboneFinetuning, BaseFinetuning, Checkpoint
from trivet.errors import ConfigurationError


class WithBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        head = self.net
        self.net = nn.Sequential(self.backbone, *head)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Watch(trivet.Callback):
    """Rates of each group and whole weights of the backbone after each epoch."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.weights: list[torch.Tensor] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        weight = trainer.strategy.state_dict(module)["backbone.0.weight"]
        self.weights.append(trainer.strategy.whole(weight).detach().clone())


def fit(root: Any, strategy: str = "auto", ckpt_path: str | None = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(2)
    net, watch = WithBackbone(), Watch()
    saver = Checkpoint(Path(root) / "ck", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    tuning = BackboneFinetuning(2, backbone_initial_ratio_lr=0.1, train_bn=False)
    made = trainer(root, tuning, watch, saver, max_epochs=5, strategy=strategy)
    made.fit(net, loader(), ckpt_path=ckpt_path)
    return watch.rates, watch.weights, {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2)])
def test_the_backbone_trains_from_its_epoch_on(tmp_path: Path, strategy: str, ranks: int) -> None:
    for rates, weights, _ in run(ranks, fit, tmp_path, strategy):
        assert rates[:2] == [[0.1], [0.1]]
        assert [rate for _, rate in rates[2:]] == pytest.approx([0.01, 0.02, 0.04])
        moved = [not torch.equal(before, after) for before, after in pairwise(weights)]
        assert moved == [False, True, True, True]


@pytest.mark.parametrize("epoch", ["2", "3"])
def test_resumed_it_ends_the_same_to_the_bit(tmp_path: Path, epoch: str) -> None:
    _, _, whole = fit(tmp_path / "whole")
    rates, _, rest = fit(tmp_path / "rest", ckpt_path=str(tmp_path / "whole" / "ck" / epoch))
    assert rates[-1] == pytest.approx([0.1, 0.04])
    for name, value in whole.items():
        assert torch.equal(value, rest[name]), name


def test_freezing() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)}))
    BaseFinetuning.freeze(block)
    assert [param.requires_grad for param in block.parameters()] == [False, False, True, True, False]
    assert block[1].track_running_stats
    BaseFinetuning.freeze(block, train_bn=False)
    assert not any(param.requires_grad for param in block.parameters())
    assert not block[1].track_running_stats
    assert len(list(BaseFinetuning.filter_params(block, requires_grad=False))) == 5
    assert len(list(BaseFinetuning.filter_params(block, train_bn=False, requires_grad=False))) == 3
    BaseFinetuning.make_trainable([block[0], [block[1]]])
    assert [param.requires_grad for param in block.parameters()] == [True, True, True, True, False]
    optimizer = torch.optim.SGD(block[0].parameters(), lr=1.0)
    BaseFinetuning.unfreeze_and_add_param_group(block, optimizer)
    BaseFinetuning.unfreeze_and_add_param_group(block, optimizer)
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(2, 1.0), (3, 0.1)]


def test_a_module_without_a_backbone(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no submodule 'backbone'"):
        trainer(tmp_path, BackboneFinetuning()).fit(Net(), loader())
