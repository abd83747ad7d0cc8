"""From a Trainer and a job to a Run: what its flags mean, how a process joins a run, and how a run ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from . import capture, evaluation, loaders, loop, predictions, profilers, resume
from .callbacks.callback import Callback
from .capabilities import Resolved, recheck
from .checkpoint import directory, files
from .data.datamodule import DataModule
from .data.sharding import derive_accumulation
from .data.transfer import ahead, transfer
from .engine import build, compiling, with_hooks
from .errors import ConfigurationError, LaunchError, Terminated, TrivetError
from .hooks import Hooks, call, check_names, overrides
from .launch import profiles
from .launch.group import Group
from .launch.output import Output
from .launch.signals import Stop
from .launch.world import World
from .loggers.logger import writing
from .module import Module
from .predictions import keeps_predictions
from .resume import Beginning
from .run import Limits, Run
from .switches import Switches

if TYPE_CHECKING:
    from .job import Job
    from .trainer import Trainer


# ------------------------------------------------------------------------------------------------------------- running


def run(
    trainer: Trainer, job: Job, resolved: Resolved, world: World, leave: Callable[[Run], list[str]] | None = None
) -> list[str] | None:
    """Join the run in this process, carry out the job, and leave; hooks for exceptions and teardown run in any case.

    Returns what ``leave`` did, which is called when the job is done, on all ranks.
    """
    trainer.begin(world, job)
    module, plan = job.module, resolved.plan
    accelerator = resolved.accelerator.plugin
    accelerator.wanted = resolved.strategy.plugin.needs.accelerator | resolved.precision.plugin.needs.accelerator
    device = accelerator.device(plan.device_index(world.local_rank))
    for callback in trainer.callbacks:
        check_names(callback, Callback)
    check_names(module, Module)
    if job.datamodule is not None:
        check_names(job.datamodule, DataModule)
    hooks = Hooks(trainer, module, trainer.callbacks)
    profiler = trainer.profiler if trainer.profiler.measures else None
    if profiler is not None:
        profilers.attach_hooks(profiler, hooks)
    for logger in trainer.loggers:
        logger.rank = world.rank
    collect_earlier(module)
    group: Group | None = None
    output: Output | None = None
    failed = True
    with ExitStack() as leaving:  # runs all that it was given, last first, also when one of them raises
        leaving.callback(lambda: group.close(abort=failed) if group is not None else None)
        leaving.callback(lambda: output.close(failed=failed) if output is not None else None)
        if world.world_size > 1:
            leaving.callback(gc.collect)  # a wrapper's autograd hooks would outlive the process group
        leaving.callback(lambda: finish_logging(trainer, "failed" if failed else "success"))
        leaving.callback(accelerator.teardown)
        accelerator.setup(device)
        leaving.callback(trainer.detach)
        leaving.callback(lambda: teardown(job, hooks))
        try:
            profiles.apply(plan.comm_profile, os.environ, world.local_world_size)
            backend = plan.backend if world.world_size > 1 else None
            group = Group.open(world, backend, device, timeout=trainer.timeout)
            group.synchronize = accelerator.synchronize
            group.watch_over(trainer.pulse, trainer.whereabouts, trainer.timeout)
            beginning = Beginning(job.ckpt_path) if job.settled else resume.follow(trainer, job, group, leaving)
            job = job if job.settled else begun(trainer, job, beginning)
            output = speak(trainer, job, group)
            if profiler is not None:
                leaving.callback(profiler.teardown)
                leaving.callback(profiler.describe)
                where = group.exchange("profiler", str(trainer.log_dir) if world.rank == 0 else "")[0]
                profiler.setup(job.stage, world.rank, where)
            switches = Switches(trainer, resolved.precision.plugin.policy)
            with Stop(world, active=job.stage == "fit") as stop, switches, compiling(trainer.compile):
                prepare(job, hooks, group)
                running = join(trainer, job, resolved, world, group, stop, hooks, device)
                leaving.callback(release, running)
                leaving.callback(running.close_data)
                leaving.callback(running.background.close)
                if profiler is not None:
                    profilers.attach(profiler, running)
                trainer.attach(running)
                if job.ckpt_path is not None:
                    restore(running, job)
                if job.stage == "fit" and not beginning.ended:
                    if trainer.enable_checkpointing:
                        capture.check(running)
                    if world.rank == 0 and trainer.checkpoint_callbacks and not job.noted:
                        beginning.note(trainer, leaving)
                    start_logging(running)
                    loop.fit(running)
                    running.background.settle()
                    beginning.end(trainer)
                elif job.stage != "fit":
                    evaluation.evaluate(running, loaders.KINDS[job.stage])
                    if job.return_predictions:
                        trainer.predictions = predictions.collect(running)
                left = None if leave is None else leave(running)
                if world.source != "local" and trainer.return_weights:
                    engine = running.engine
                    engine.strategy.release(engine.root)  # this process goes on after the run
            failed = False
        except BaseException as exception:
            error = on_failure(exception, trainer, job, hooks, group)
            if output is not None:
                output.note(error)
            if isinstance(error, Terminated):
                say_terminated(error, trainer)
            if error is exception:
                raise
            raise error from exception
    if stop.requested and world.source != "local":  # too late to stop anything; a launcher answers for its workers
        raise stop.reason(trainer.progress.update)
    return left


_LARGE_BYTES, _SELDOM_S = 2**24, 20.0
_trained: WeakSet[nn.Module] = WeakSet()  # modules of this process's runs that still exist
_collected = [time.monotonic()]


def collect_earlier(module: nn.Module) -> None:
    """Free what earlier runs of this process left: weights, optimizers and data that nobody holds any more hold each
    other. A collection takes 0.2 s, so for small models it is made every 20 s at most."""
    late = time.monotonic() > _collected[0] + _SELDOM_S
    if any(late or _bytes(other) >= _LARGE_BYTES for other in _trained if other is not module):
        gc.collect()
        _collected[0] = time.monotonic()
    _trained.add(module)


def _bytes(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())


def begun(trainer: Trainer, job: Job, beginning: Beginning) -> Job:
    """The job with the checkpoint that was decided on."""
    trainer.continues = beginning.continues
    if job.stage == "fit" and beginning.path is not None and not beginning.continues:
        trainer.resumed_from = str(files.place(beginning.path))
    return replace(job, ckpt_path=beginning.path)


def speak(trainer: Trainer, job: Job, group: Group) -> Output | None:
    """From here on rank 0 speaks on the terminal, and each rank of a fit writes a file in the run's directory."""
    if group.side is None:
        return None
    writes = job.stage == "fit" and not trainer.fast_dev_run and (trainer.loggers or trainer.enable_checkpointing)
    where = group.exchange("logs", str(trainer.log_dir) if writes and group.world.rank == 0 else "")[0]
    output = Output(group.world, group.side, Path(where) if where else None)
    if group.watchdog is not None:
        group.watchdog.log = output.path
    return output


def release(run: Run) -> None:
    """Let go of what the strategy and the check of the first update put around the module."""
    if run.first is not None:
        run.first.stop()
    for guard in run.guards:
        guard.remove()
    if run.engine.step.compiled:
        del run.module.log, run.module.log_dict  # what `Run` put before the class's
    run.engine.strategy.teardown(run.engine.root)
    run.engine.root = run.engine.step


def prepare(job: Job, hooks: Hooks, group: Group) -> None:
    """Data is prepared once per machine; then every process sets itself up."""
    if group.world.local_rank == 0:
        for owner in (job.datamodule, job.module):
            if owner is not None and (owner.prepare_data_per_node or group.world.rank == 0):
                owner.prepare_data()
    group.barrier()
    if job.datamodule is not None:
        job.datamodule.setup(job.stage)
    call(hooks.setup, job.stage)


def join(
    trainer: Trainer, job: Job, resolved: Resolved, world: World, group: Group, stop: Stop, hooks: Hooks,
    device: torch.device,
) -> Run:  # fmt: skip
    """Compose the engine and the data of this rank."""
    module = job.module
    seed = int(group.exchange("seed", str(job.seed))[0])
    train = job.stage == "fit"
    if train and job.ckpt_path is not None:
        seed = directory.read_seed(job.ckpt_path)  # order and augmentation follow from it: they go on as they began
    accumulate = trainer.accumulate_grad_batches
    loader = loaders.training(job) if train else None
    if train and trainer.global_batch_size is not None:
        size = getattr(loader, "batch_size", None)
        accumulate = recheck(resolved, derive_accumulation(trainer.global_batch_size, size, world.world_size))
    plan = replace(resolved.plan, accumulate=accumulate)
    late = trainer.on_skip is not None and world.world_size > 1
    clips_itself = train and module.automatic_optimization and overrides(module, Module, "configure_gradient_clipping")
    if clips_itself and "user_optimizer" not in resolved.strategy.plugin.offers:
        raise ConfigurationError(
            f"{type(module).__name__} overrides configure_gradient_clipping, and strategy {plan.strategy!r} clips in a "
            "step of its own. Use Trainer(gradient_clip_val=...) instead, or --strategy ddp, zero or fsdp."
        )
    backward = with_hooks(module, hooks)
    data = loaders.load(trainer, job, world, loader, accumulate=accumulate, seed=seed)
    engine = build(
        module,
        plan=plan,
        strategy=resolved.strategy.plugin,
        accelerator=resolved.accelerator.plugin,
        precision=resolved.precision.plugin,
        world=world,
        device=device,
        clip=None if clips_itself else trainer.clip,
        late=late,
        sync_batchnorm=trainer.sync_batchnorm,
        train=train,
        restored=job.ckpt_path is not None,
        backward=backward,
        same_on_all_ranks=same_on_all_ranks(group),
        configure_optimizers=module.configure_optimizers if train else None,
        compiled=trainer.compile,
    )
    plan = replace(plan, notes=(*plan.notes, *filter(None, [engine.precision.converted])))
    for name, told in ((plan.strategy, engine.strategy.laid_out), (plan.precision, engine.precision.converted)):
        if told and trainer.enable_progress_bar and world.rank == 0:
            print(f"{name}: {told}", file=sys.stderr, flush=True)
    if clips_itself:
        engine.clip = trainer.clip
    moves = transfer(engine, partial(loaders.own_hook, job))
    running = Run(
        trainer=trainer, module=module, engine=engine, plan=plan, hooks=hooks, world=world, group=group, stop=stop,
        progress=trainer.progress, train_data=trainer.train_data, limits=trainer.limits, seed=seed,
        accumulate=accumulate, on_skip=trainer.on_skip,
        data=data, transfer=moves, ahead=ahead(engine, moves),
        same_on_all_ranks=same_on_all_ranks(group),
        backward=backward, keeps_predictions=job.stage == "predict" and keeps_predictions(trainer, job),
    )  # fmt: skip
    read_loaders(running)
    if train:
        running.reload = loaders.reloading(running, job, read_loaders)
    return running


def read_loaders(run: Run) -> None:
    """What is known of the run by its loaders: whether they say how many samples are in a batch, and how long an epoch
    is."""
    trainer, weighs = run.trainer, overrides(run.module, Module, "batch_weight")
    for kind, metrics in (("train", run.train_metrics), ("val", run.val_metrics), ("test", run.test_metrics)):
        given = trainer.dataloaders.get(kind)
        metrics.sizes_known = (weighs and kind == "train") or loaders.says_sizes(given)
    if run.train_data is not None:
        run.limits = validation_interval(run, trainer.val_fraction)


def validation_interval(run: Run, fraction: float | None) -> Limits:
    """The limits with a fraction of an epoch, of ``val_check_interval``, as micro-batches of this rank."""
    limits = run.limits
    assert run.train_data is not None
    batches = run.train_data.num_batches
    if fraction is not None:
        if batches is None:
            raise ConfigurationError(
                f"val_check_interval={fraction!r} is a fraction of an epoch, but the training loader has no length. "
                "Give a number of batches."
            )
        return replace(limits, val_every_batches=max(1, int(batches * fraction)))
    interval = limits.val_every_batches
    if interval is not None and batches is not None and interval > batches and not limits.val_across_epochs:
        raise ConfigurationError(
            f"val_check_interval={interval} batches, but an epoch has only {batches}. Give at most {batches}, or use "
            "check_val_every_n_epoch, which is None where the interval counts on from epoch to epoch."
        )
    return limits


SAME_S = 30.0
"""How long a rank waits for the others to notice the same change; those that did not change come to no such check."""


def same_on_all_ranks(group: Group) -> Callable[[str, Any], None]:
    """A check through the store that all ranks have the same names; see `Context`."""

    def check(what: str, names: Any) -> None:
        remedy = "Do it on every rank at the same update."
        try:
            texts = group.exchange(f"same/{what}", "\n".join(names), timeout_s=SAME_S)
        except LaunchError as error:
            raise TrivetError(
                f"{what} on rank {group.world.rank}: {list(names)}, but not on all ranks. {remedy}"
            ) from error
        everyone = [set(text.split("\n")) for text in texts]
        for rank, theirs in enumerate(everyone):
            odd = sorted(theirs ^ everyone[0])
            if odd:
                raise TrivetError(f"{what}: rank {rank} differs from rank 0 in {odd}. {remedy}")

    return check


def restore(run: Run, job: Job) -> None:
    """Read a checkpoint into the run: everything for a fit, weights for a validation."""
    assert job.ckpt_path is not None
    fit, rank = job.stage == "fit", run.world.rank
    everywhere = partial(run.group.exchange, "checkpoint", "", 1800.0)  # a damaged file on one rank changes none
    with directory.reading(job.ckpt_path, capture.template(run), beside=fit, rank=rank, before=everywhere) as state:
        if fit:
            capture.restore(run, state, job.ckpt_path)


# -------------------------------------------------------------------------------------------------------------- the end


def on_failure(
    exception: BaseException, trainer: Trainer, job: Job, hooks: Hooks, group: Group | None
) -> BaseException:
    """Find out who failed first, tell the others, run the hooks, and return what to raise."""
    if group is not None:
        exception = group.settle(exception)
    try:
        call(hooks.on_exception, exception)
        if job.datamodule is not None:
            job.datamodule.on_exception(exception)
    except Exception as second:
        exception.add_note(f"and on_exception raised {type(second).__name__}: {second}")
    return exception


def say_terminated(error: Terminated, trainer: Trainer) -> None:
    if not trainer.is_global_zero:
        return
    saved = f"checkpoint: {error.checkpoint}" if error.checkpoint else "no checkpoint was saved"
    if trainer.checkpoint_callback is None:
        saved += ", since there is no Checkpoint callback"
    name = signal.Signals(error.signal).name
    print(f"trivet: {name}: training ended after update {error.update}; {saved}", file=sys.stderr, flush=True)


def teardown(job: Job, hooks: Hooks) -> None:
    """The last hooks; a failing one hides no earlier failure, which Python chains."""
    if job.datamodule is not None:
        job.datamodule.teardown(job.stage)
    call(hooks.teardown, job.stage)


def start_logging(run: Run) -> None:
    if run.world.rank == 0:
        for logger in run.trainer.loggers:
            if run.module.logs_hparams:
                with writing(logger):
                    logger.log_hyperparams(capture.plain_hparams(run.module.hparams.__dict__))
            if not run.engine.strategy.joint_forward:  # the graph is found by calling the module, here alone
                logger.log_graph(run.module)


def finish_logging(trainer: Trainer, status: str) -> None:
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            with writing(logger):
                logger.finalize(status)


def by_loader(metrics: Mapping[str, float]) -> list[dict[str, float]]:
    """Metrics of several loaders apart, each with those that belong to no loader."""
    marker = "/dataloader_idx_"
    numbers = sorted({int(name.rsplit(marker, 1)[1]) for name in metrics if marker in name})
    shared = {name: value for name, value in metrics.items() if marker not in name}
    if not numbers:
        return [shared]
    return [{**shared, **{k: v for k, v in metrics.items() if k.endswith(f"{marker}{n}")}} for n in numbers]
