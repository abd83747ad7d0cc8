"""Python's and numpy's random numbers in steps and data: the same wherever a run was resumed, whoever read the data."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trivet
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[Any]):
    def __init__(self, drawn: set[int]) -> None:
        self.drawn = drawn

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        noise = (random.random(), float(np.random.rand())) if index in self.drawn else (0.0, 0.0)
        return torch.tensor([float(index), *noise])


class Net(trivet.Module):
    def __init__(self, drawn: set[int], between: bool) -> None:
        super().__init__()
        self.net, self.drawn, self.between = torch.nn.Linear(3, 1), drawn, between
        self.seen: dict[Any, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = (random.random(), float(np.random.randn())) if self.global_step in self.drawn else None
        self.seen[self.global_step] = [batch.tolist(), noise, float(torch.rand(()))]
        return self.net(batch / 80).square().mean()

    def on_update_end(self) -> None:
        if self.between:
            self.seen["between", self.global_step] = random.random()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validation", self.global_step, batch_idx] = random.random(), float(np.random.rand())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(path: Path, steps: int, drawn: set[int], data: set[int], ckpt: Any = None, **more: Any) -> Any:
    trivet.seed_everything(3 if ckpt is None else 4)
    module = Net(drawn, more.get("between", False))
    random.random()
    saver = trivet.Checkpoint(path, filename="end", every_n_updates=more.get("every"))
    trainer = trivet.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=9,
        val_check_interval=more.get("val", 1.0),
        logger=False,
        callbacks=[saver],
        enable_progress_bar=False,
        default_root_dir=path,
    )
    loader = DataLoader(Rows(data), batch_size=None, shuffle=True, num_workers=more.get("workers", 0))
    trainer.fit(module, loader, DataLoader(Rows(set()), batch_size=40) if "val" in more else None, ckpt_path=ckpt)
    return module.seen, saver.last_model_path


STEPS = {"never": set(), "rarely": {0, 3, 70, 75, 90, 100}, "always": set(range(110))}
DATA: dict[str, set[int]] = {"never": set(), "one": {71}, "always": set(range(80))}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("steps", STEPS)
def test_wherever_it_is_resumed(tmp_path: Path, steps: str, data: str):
    more: dict[str, Any] = {"between": steps == "always", "val": 30}
    whole, _ = train(tmp_path / "whole", 110, STEPS[steps], DATA[data], every=25, **more)
    unsaved, _ = train(tmp_path / "unsaved", 110, STEPS[steps], DATA[data], **more)
    assert unsaved == whole
    for stop in (2, 60, 80):
        first, path = train(tmp_path / f"first{stop}", stop, STEPS[steps], DATA[data], **more)
        second, _ = train(tmp_path / f"second{stop}", 110, STEPS[steps], DATA[data], path, **more)
        assert {**first, **second} == whole


def test_whoever_reads_the_data(tmp_path: Path):
    runs = [train(tmp_path / str(n), 110, STEPS["rarely"], DATA["one"], workers=n)[0] for n in (0, 1, 2)]
    assert runs[0] == runs[1] == runs[2]
    drawn = [seen[1] for seen in runs[0].values() if seen[1] is not None]
    assert len(set(drawn)) == len(drawn) == 6


def test_draws_between_updates_differ_from_update_to_update(tmp_path: Path):
    seen, _ = train(tmp_path, 100, set(), set(), between=True)
    drawn = [value for key, value in seen.items() if isinstance(key, tuple)]
    assert len(set(drawn)) == len(drawn) == 100
