"""Accelerate: a loop of one's own."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from speed_tasks import Asked, Task
from torch import nn

SUPPORTS = {"bf16", "clip"}


def fit(task: Task, asked: Asked) -> nn.Module:
    AcceleratorState._reset_state(True)  # it keeps the precision of the first one of a process
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if asked.bf16 else "no")
    net = task.model()
    model, optimizer, loader = accelerator.prepare(net, task.optimizer(net.parameters()), task.loader())
    loss_of = task.loss
    for _ in range(task.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model(x), y))
            if asked.clip:
                accelerator.clip_grad_norm_(model.parameters(), asked.clip)
            optimizer.step()
    return net
