"""Rows of the loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .loggers.logger import writing

if TYPE_CHECKING:
    from .run import Run


def log_row(run: Run, row: dict[str, float]) -> None:
    """Write a row to the loggers, on rank 0, at the one axis: updates applied."""
    if skipped := float(run.progress.skipped):
        run.train_metrics.values["skipped"] = skipped
        if row or run.trainer.logged_metrics.get("skipped") != skipped:
            row = {**row, "skipped": skipped}
    run.trainer.logged_metrics.update(row)
    if row and run.world.rank == 0:
        for logger in run.trainer.loggers:
            with writing(logger):
                logger.log_metrics({**row, "epoch": float(run.progress.epoch)}, step=run.progress.update)
