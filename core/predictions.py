"""What `Trainer.predict` returns: every prediction once, in the order of the data, whoever made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from .job import Job
    from .run import Run
    from .trainer import Trainer


def keeps_predictions(trainer: Trainer, job: Job) -> bool:
    """Whether predictions are kept until the end: because they are returned, or for a writer at the end."""
    if job.return_predictions:
        return True
    from .callbacks.prediction_writer import PredictionWriter

    return any(isinstance(callback, PredictionWriter) and callback.at_end for callback in trainer.callbacks)


def collect(run: Run) -> list[Any] | None:
    """The predictions of all ranks: a list of batches, and a list of such lists where there are several loaders.

    All ranks call it. They come to rank 0 alone where a launcher hands them to the process that called, else to all.
    """
    mine = [[(number, prediction) for number, prediction, _ in loader] for loader in run.predictions]
    world = run.world
    everyone: list[Any] | None = [mine]
    if world.world_size > 1:
        everyone = [None] * world.world_size
        if world.source == "local":
            everyone = everyone if world.rank == 0 else None
            dist.gather_object(mine, everyone, dst=0)  # all ranks
        else:
            dist.all_gather_object(everyone, mine)  # all ranks
    if everyone is None:
        return None
    joined = [
        [prediction for _, prediction in sorted((one for rank in everyone for one in rank[n]), key=lambda one: one[0])]
        for n in range(len(mine))
    ]
    return joined[0] if len(joined) == 1 else joined
