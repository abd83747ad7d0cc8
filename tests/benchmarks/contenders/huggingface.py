"""Hugging Face's Trainer, which steps a scheduler and computes the gradient's norm in any case."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState
from speed_tasks import Asked, Task
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

SUPPORTS = {"bf16", "clip", "callbacks", "empty_callbacks", "conveniences"}


class Empty(TrainerCallback):
    pass


class Noop(TrainerCallback):
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        pass


class Net(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net, self.loss_of = task.model(), task.loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss_of(self.net(x), labels)}


class Given(Trainer):
    given: Any

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(self.given)


def fit(task: Task, asked: Asked) -> nn.Module:
    AcceleratorState._reset_state(True)
    arguments = TrainingArguments(
        str(asked.folder / "huggingface"),
        use_cpu=True,
        bf16=asked.bf16,
        num_train_epochs=task.epochs,
        max_grad_norm=asked.clip or 0,
        report_to="none",
        disable_tqdm=not asked.conveniences,
        logging_strategy="steps" if asked.conveniences else "no",
        logging_steps=50,
        save_strategy="epoch" if asked.conveniences else "no",
        save_total_limit=1,
        log_level="error",
    )
    net, loader = Net(task), task.loader(named=True)
    optimizer = task.optimizer(net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    callbacks = [Noop() for _ in range(asked.callbacks)] + [Empty() for _ in range(asked.empty_callbacks)]
    trainer = Given(net, arguments, train_dataset=loader.dataset, callbacks=callbacks, optimizers=(optimizer, schedule))
    trainer.given = loader
    trainer.train()
    return net.net
