"""The loop that everybody writes first: the reference. Conveniences, metrics and callbacks cost it nothing."""

from __future__ import annotations

import torch
from speed_tasks import Asked, Task
from torch import nn

SUPPORTS = {"bf16", "clip", "callbacks", "empty_callbacks", "metrics", "conveniences"}


def fit(task: Task, asked: Asked) -> nn.Module:
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    parameters, loader, loss_of = list(model.parameters()), task.loader(), task.loss
    autocast = torch.autocast("cpu", torch.bfloat16)
    for _ in range(task.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            if asked.bf16:
                with autocast:
                    loss = loss_of(model(x), y)
            else:
                loss = loss_of(model(x), y)
            loss.backward()
            if asked.clip:
                nn.utils.clip_grad_norm_(parameters, asked.clip)
            optimizer.step()
    return model
