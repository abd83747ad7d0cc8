"""C15: to train for 2 epochs and then, in a new process, for 2 more is to train for 4, to the bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    """Each sample is augmented with random numbers when it is read."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index, torch.full((4,), float(index)) / 16 + 0.1 * torch.randn(4)


class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        self.order, self.losses = [], []

    def training_step(self, batch, batch_idx):
        index, x = batch
        self.order.append((self.current_epoch, index.tolist()))
        loss = (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "update"}}


def train(directory, resume_from=None, *, batch_size=4, **options):
    """Train and save; returns everything that can be compared."""
    trivet.seed_everything(11 if resume_from is None else 999)
    module = Net()
    if resume_from is not None:
        torch.rand(17)  # whatever was drawn before must not matter
    callback = trivet.Checkpoint(directory, filename="end", every_n_updates=options.pop("every", None))
    trainer = scalar.trainer(log_every_n_steps=1, enable_checkpointing=True, callbacks=[callback], **options)
    found = {}

    def keep():
        found["optimizer"] = {
            name: {
                k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in trainer.optimizers[0].state[p].items()
            }
            for name, p in module.named_parameters()
        }

    module.on_train_end = keep
    generator = torch.Generator().manual_seed(5)
    data = DataLoader(Noisy(), batch_size, shuffle=True, generator=generator)
    trainer.fit(module, data, ckpt_path=resume_from)
    return {
        **found,
        "weights": module.state_dict(),
        "order": module.order,
        "losses": module.losses,
        "epoch loss": trainer.callback_metrics["loss_epoch"],
        "progress": {k: v for k, v in trainer.progress.to_dict().items() if k != "seconds"},
        "path": callback.last_model_path,
    }


def same(one, other):
    """Equal to the bit, through all containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def check(whole, first, second):
    assert same(first["order"] + second["order"], whole["order"])
    assert same(first["losses"] + second["losses"], whole["losses"])
    assert second["epoch loss"] == whole["epoch loss"]
    for name in ("weights", "optimizer", "progress"):
        assert same(second[name], whole[name]), name


NEW_PROCESS = """
import sys, torch
sys.path[:0] = {path!r}
import test_c15_resume as case
torch.save(case.train({directory!r}, {checkpoint!r}, max_epochs=4), {out!r})
"""


def test_in_a_new_process(tmp_path):
    whole = train(tmp_path / "whole", max_epochs=4)
    first = train(tmp_path / "first", max_epochs=2)
    code = NEW_PROCESS.format(
        path=[str(Path(__file__).parent), str(Path(scalar.__file__).parent)],
        directory=str(tmp_path / "second"),
        checkpoint=first["path"],
        out=str(tmp_path / "out.pt"),
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    second = torch.load(tmp_path / "out.pt", weights_only=False)
    check(whole, first, second)


# 16 samples: in batches of 4 an epoch has 4 updates on one rank, 2 on two ranks, fewer where it accumulates
VARIANTS = [
    {"until": {"max_steps": 5}},
    {"until": {"max_steps": 3}, "accumulate_grad_batches": 3},
    {"until": {"max_steps": 1}},
    {"until": {"max_epochs": 2}, "accumulate_grad_batches": 2, "precision": "bf16"},
    {"until": {"max_steps": 2}, "precision": "fp16"},
    {"until": {"max_epochs": 1}, "batch_size": 2, "gradient_clip_val": 0.1},
]


def train_both(directory, variant):
    variant = dict(variant)
    until = variant.pop("until")
    if "max_steps" in until:
        until["max_epochs"] = 4
    whole = train(directory / "whole", max_epochs=4, **variant)
    first = train(directory / "first", **until, **variant)
    second = train(directory / "second", first["path"], max_epochs=4, **variant)
    return whole, first, second


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: " ".join(f"{k}={v}" for k, v in variant.items()))
def test_wherever_it_stops(tmp_path, world_size, variant):
    for ranks in run(world_size, train_both, tmp_path, variant):
        check(*ranks)
