"""Batches that begin to move while the update before theirs is worked on, with an accelerator that writes down when."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from trivet.accelerators.cpu import CPU
from trivet.data.train import TrainData


class Early(CPU):
    """The CPU, with transfers that can be begun."""

    moves_batches = True

    def __init__(self, early: bool = True) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.ahead = self.begun if early else None

    def begun(self, batch: Any, device: torch.device) -> Callable[[], Any]:
        self.seen.append(("begun", batch["n"].tolist()))
        return lambda: self.to_device(batch, device)

    def to_device(self, batch: Any, device: torch.device) -> Any:
        self.seen.append(("moved", batch["n"].tolist()))
        return {name: tensor.clone() for name, tensor in batch.items()}


class Drawn(Dataset[Any]):
    """Samples that draw random numbers as they are read; one of them may not be readable."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise OSError("a hole in the disk")
        return {"n": torch.tensor(index), "x": torch.randn(3)}


class Net(trivet.Module):
    def __init__(self, device: Early, save: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.device_seen, self.save = device.seen, save

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.device_seen.append(("used", batch["n"].tolist()))
        return self.net(batch["x"]).square().mean()

    def on_update_end(self) -> None:
        if self.save is not None and self.trainer.progress.update == 2:
            self.trainer.save_checkpoint(self.save)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(device: Early, *, data: Any = None, accumulate: int = 1, module: Any = None, **options: Any) -> Net:
    module = module or Net(device, options.pop("save", None))
    trainer = trivet.Trainer(
        accelerator=device, strategy="single", max_epochs=2, accumulate_grad_batches=accumulate, logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    torch.manual_seed(5)
    trainer.fit(module, DataLoader(data or Drawn(), 2, shuffle=True), **options)
    return module


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.state_dict().values(), right.state_dict().values(), strict=True))


def test_the_next_updates_first_batch_is_begun_before_this_one_is_used() -> None:
    early, usual = Early(), Early(early=False)
    assert same(fit(early, accumulate=2), fit(usual, accumulate=2)), "the same numbers are drawn"
    used = [batch for what, batch in usual.seen if what == "used"]
    assert [batch for what, batch in early.seen if what == "used"] == used
    assert [batch for what, batch in early.seen if what == "moved"] == used, "each once, in its turn"
    for epoch in (used[:5], used[5:]):
        firsts = epoch[::2]
        for earlier, later in pairwise(firsts):
            assert early.seen.index(("begun", later)) < early.seen.index(("used", earlier))
        assert ("begun", firsts[0]) not in early.seen


def test_the_position_is_that_of_the_batch_that_was_used(tmp_path: Path) -> None:
    whole = fit(Early(), save=tmp_path / "saved")
    for device in (Early(), Early(early=False)):
        resumed = fit(device, ckpt_path=tmp_path / "saved")
        assert len([what for what, _ in device.seen if what == "used"]) == 8
        assert same(whole, resumed)


def test_what_reading_ahead_raises_is_raised_in_its_turn() -> None:
    early, usual = Early(), Early(early=False)
    for device in (early, usual):
        with pytest.raises(OSError, match="a hole in the disk"):
            fit(device, data=Drawn(broken=7))
    kinds = [[batch for what, batch in device.seen if what == "used"] for device in (early, usual)]
    assert kinds[0] == kinds[1] != []


@pytest.mark.parametrize("weigh", [None, lambda batch: 1.0])
def test_nothing_is_read_early_where_ranks_agree_on_weights(weigh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivet.data.window.sum_over_ranks", lambda values: [2 * value for value in values])
    early: list[Any] = []
    data = TrainData(DataLoader(Drawn(), 2), rank=0, world_size=2, accumulate=1, seed=0, weigh=weigh)
    assert len(list(data.epoch(0, early.append))) == 3
    assert len(early) == (2 if weigh is None else 0)


def test_nothing_is_begun_where_a_hook_has_a_part_in_it() -> None:
    class After(Net):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {**batch, "x": batch["x"] + torch.rand(())}

    device = Early()
    fit(device, module=After(device))
    assert {what for what, _ in device.seen} == {"moved", "used"}
