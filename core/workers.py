"""Worker processes: what a launcher hands them, and what comes back of rank 0."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import capture, resume, session
from .capabilities import Resolved
from .checkpoint import directory
from .job import Job
from .launch.world import World
from .module import Module
from .state import Progress
from .supervise import Supervisor

if TYPE_CHECKING:
    from .run import Run
    from .trainer import Trainer

# objects of the user that workers are handed
GIVEN = ("module", "train_dataloaders", "val_dataloaders", "dataloaders", "datamodule")


def launch(trainer: Trainer, job: Job, resolved: Resolved) -> None:
    """Start workers, again where that was asked for, wait for them, and take over what rank 0 left."""
    with ExitStack() as leaving:
        beginning = resume.Beginning()
        supervised = job.stage == "fit" and bool(trainer.max_restarts or trainer.min_devices)
        if not resolved.where:  # else several processes launch, and rank 0 decides
            beginning = resume.begin(trainer, job, leaving)
            job = session.begun(trainer, job, beginning)
            job.settled, job.noted = True, supervised or bool(job.resume)  # workers that note would hold what we hold
        if job.noted:
            beginning.note(trainer, leaving)
        if beginning.ended:
            take_ended(trainer, job)
            return
        name = leaving.enter_context(tempfile.TemporaryDirectory(prefix="trivet-result-"))
        if supervised:
            Supervisor(trainer, job, beginning).run(resolved, partial(start, trainer, Path(name)))
        else:
            start(trainer, Path(name), job, resolved)
        result = torch.load(Path(name) / "result.pt", weights_only=False)  # written by our own workers
        if result["weights"] is not None:
            take_weights(job.module, result, Path(name), resolved)
        trainer.progress = result["progress"]
        if job.noted:
            beginning.end(trainer)
    capture.load_callbacks(trainer.callbacks, result["callbacks"])
    trainer.logged_metrics = result["logged_metrics"]
    trainer.final_metrics = result["metrics"]
    trainer.predictions = result["predictions"]
    trainer.final_shown = result["shown"]
    if job.stage == "fit":
        trainer.sizes = result["sizes"]
    trainer.hold(job)


def start(trainer: Trainer, run_dir: Path, job: Job, resolved: Resolved) -> None:
    """Start workers once, and wait for them."""
    given = {field: getattr(job, field) for field in GIVEN}  # by the names that the user knows
    nothing: Any = dict.fromkeys(GIVEN)
    parts = {"trainer": trainer, **given, "job": replace(job, **nothing)}
    assert resolved.launcher is not None
    where = resolved.where and {**resolved.where, "timeout": trainer.timeout}
    resolved.launcher.plugin.launch("trivet.workers:work", parts, resolved.plan, run_dir=run_dir, **where)


def take_ended(trainer: Trainer, job: Job) -> None:
    """Of a run that has ended before: its weights and how far it came."""
    assert job.ckpt_path is not None
    trainer.progress = Progress.from_dict(directory.manifest(job.ckpt_path)["progress"])
    if trainer.return_weights:
        resume.take(job.module, job.ckpt_path)


def work(parts: Mapping[str, Any], world: World, out_dir: Path) -> None:
    """What each worker of a launcher does."""
    trainer: Trainer = parts["trainer"]
    job: Job = replace(parts["job"], **{field: parts[field] for field in GIVEN})
    resolved = trainer.resolve(job.module, world, launched=True)
    leave = partial(leave_weights, out_dir=out_dir) if job.stage == "fit" and trainer.return_weights else None
    weights = session.run(trainer, job, resolved, world, leave)
    if leaves_result(world):
        callback = trainer.checkpoint_callback
        result = {
            "callbacks": {c.state_key: state for c in trainer.callbacks if (state := c.state_dict())},
            "progress": trainer.progress,
            "metrics": trainer.callback_metrics,
            "logged_metrics": trainer.logged_metrics,
            "shown": trainer.progress_bar_metrics,
            "sizes": (trainer.train_data.num_batches, trainer.train_data.num_updates) if trainer.train_data else None,
            "checkpoint": callback.last_model_path or callback.best_model_path if callback else "",
            "weights": weights,
            "predictions": trainer.predictions,
        }
        torch.save(result, out_dir / "result.pt")


def leaves_result(world: World) -> bool:
    """Whether a process waits for what this rank leaves: where each node was launched by itself, one on each."""
    return world.local_rank == 0 and (world.rank == 0 or world.source == "local")


def leave_weights(run: Run, out_dir: Path) -> list[str]:
    """Write the module's tensors as files, one after the other, so that nobody holds a second model. All ranks."""
    strategy = run.engine.strategy
    state = strategy.state_dict(run.engine.module)
    for index, value in enumerate(state.values()):
        whole = strategy.whole(value) if isinstance(value, torch.Tensor) else value
        if leaves_result(run.world):
            torch.save(whole.cpu() if isinstance(whole, torch.Tensor) else whole, out_dir / f"{index}.pt")
    return list(state)


def take_weights(module: Module, result: Mapping[str, Any], out_dir: Path, resolved: Resolved) -> None:
    """Read what `leave_weights` wrote into the caller's module."""
    names: list[str] = result["weights"]
    if set(names) != set(module.state_dict()):
        where = result["checkpoint"] or "no checkpoint"
        warnings.warn(
            "the trained module has other parameters than this one (configure_model builds them in the workers), so it "
            f"was left as it was; the weights are in {where}.",
            stacklevel=4,
        )
        return
    resolved.precision.plugin.convert(module)  # as a fit in this process would leave it
    for index, name in enumerate(names):
        value = torch.load(out_dir / f"{index}.pt", weights_only=False)  # written by our own workers
        module.load_state_dict({name: value}, strict=False)
