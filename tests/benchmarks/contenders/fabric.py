"""Lightning Fabric: a loop of one's own."""

from __future__ import annotations

from lightning_fabric import Fabric
from speed_tasks import Asked, Task
from torch import nn

SUPPORTS = {"bf16", "clip"}


def fit(task: Task, asked: Asked) -> nn.Module:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if asked.bf16 else "32-true")
    fabric.launch()
    net = task.model()
    model, optimizer = fabric.setup(net, task.optimizer(net.parameters()))
    loader, loss_of = fabric.setup_dataloaders(task.loader()), task.loss
    for _ in range(task.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(loss_of(model(x), y))
            if asked.clip:
                fabric.clip_gradients(model, optimizer, max_norm=asked.clip)
            optimizer.step()
    return net
