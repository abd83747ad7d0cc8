"""The plain loop with conveniences by hand: a bar with three metrics, a CSV row every 50 steps, a checkpoint."""

from __future__ import annotations

import csv
import sys

import torch
from speed_tasks import Asked, Task
from torch import nn
from tqdm import tqdm

SUPPORTS = {"conveniences"}


def fit(task: Task, asked: Asked) -> nn.Module:
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    loader, loss_of, done = task.loader(), task.loss, 0
    with (asked.folder / "plain.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        for _ in range(task.epochs):
            bar = tqdm(loader, file=sys.stdout)
            for x, y in bar:
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                done += 1
                if done % 50 == 0:
                    value = loss.item()
                    rows.writerow([done, value, value, value])
                    bar.set_postfix(a=value, b=value, c=value, refresh=False)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, asked.folder / "plain.pt")
    return model
