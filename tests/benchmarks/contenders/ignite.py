"""Ignite's Engine with an update function of one's own."""

from __future__ import annotations

import csv
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, ProgressBar
from speed_tasks import Asked, Batch, Task
from torch import nn

SUPPORTS = {"bf16", "clip", "callbacks", "conveniences"}


def fit(task: Task, asked: Asked) -> nn.Module:
    model, loss_of = task.model(), task.loss
    optimizer = task.optimizer(model.parameters())
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=asked.bf16)

    def update(engine: Engine, batch: Batch) -> Any:
        x, y = batch
        optimizer.zero_grad()
        if asked.bf16:
            with autocast:
                loss = loss_of(model(x), y)
        else:
            loss = loss_of(model(x), y)
        loss.backward()
        if asked.clip:
            nn.utils.clip_grad_norm_(model.parameters(), asked.clip)
        optimizer.step()
        return {"a": loss, "b": loss, "c": loss} if asked.conveniences else loss

    engine = Engine(update)
    for _ in range(asked.callbacks):
        engine.add_event_handler(Events.ITERATION_STARTED, lambda engine: None)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: None)
    if not asked.conveniences:
        engine.run(task.loader(), max_epochs=task.epochs)
        return model
    ProgressBar().attach(engine, output_transform=lambda output: output)
    with (asked.folder / "ignite.csv").open("w", newline="") as file:
        rows = csv.writer(file)

        @engine.on(Events.ITERATION_COMPLETED(every=50))
        def row(engine: Engine) -> None:
            rows.writerow([engine.state.iteration, *(value.item() for value in engine.state.output.values())])

        saver = DiskSaver(asked.folder / "ignite", require_empty=False)
        engine.add_event_handler(
            Events.EPOCH_COMPLETED, Checkpoint({"model": model, "optimizer": optimizer}, saver, n_saved=1)
        )
        engine.run(task.loader(), max_epochs=task.epochs)
    return model
