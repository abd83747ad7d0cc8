"""Trainer: the front door. Flags become a Plan, the Plan is launched, and the loop runs in every process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import flags
from .checkpoint.files import as_path
from .errors import ConfigurationError
from .launch import environments
from .launch.launcher import Launcher
from .launch.world import World
from .module import Module
from .plugins import Accelerator, Precision, Strategy
from .running import Running
from .settings import known_arguments, settle
from .state import Progress

if TYPE_CHECKING:
    from datetime import timedelta

    from .capabilities import Plan, Resolved
    from .data.datamodule import DataModule
    from .job import Job
    from .profilers import Profiler
    from .run import Run

# What a job needs is imported where one begins: a script that asks for --help should not wait for it.


class Trainer(Running):
    """Trains a `Module` with a strategy, an accelerator and a precision that are chosen here.

    A plugin is given as a name, an instance or a mapping (``{"name": "ddp", "static_graph": True}``). The combination
    is checked when the Trainer is made, and once more with the module before any process starts.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"cuda"`` (``"gpu"``), or a third party's.
        strategy: ``"auto"`` (``single`` for one process, ``ddp`` for more), or any installed one.
        devices: processes on this machine: a number, a list of device indices, -1 for all, or ``"auto"``.
        num_nodes: machines. With more than one the same is started on each, as torchrun does, or with ``node_rank`` and
            ``main_address``.
        node_rank: which machine this is, from 0 up.
        main_address: the name or address of node 0, by which the others reach it.
        main_port: the port at which they meet there, 29500 by default.
        precision: ``fp32 fp64 bf16-mixed fp16-mixed bf16-true fp16-true`` or a third party's.
        plugins: objects of a Strategy, Accelerator, Precision or Launcher, instead of the argument of that name.
        launcher: ``"auto"`` (``local``, where several processes are wanted and no environment started them), or a name.
        comm_profile: a named set of variables for NCCL, gloo and OpenMP, such as ``"cuda-ethernet"``, or ``"auto"``.
            What is set already stays. ``trivet env --profile NAME`` shows it.
        logger: True for a CSV logger, False for none, or one or several: names, objects or mappings.
        callbacks: likewise; a `Checkpoint` and a progress bar are added where there are none, nobody else's ever is.
        max_epochs: epochs after which training ends; 1000 where no other limit is given, -1 for no limit.
        max_steps: updates after which training ends (one counts once however many optimizers step); -1 for no limit.
        min_epochs: epochs before which ``should_stop`` and ``max_time`` end nothing.
        min_steps: the same in updates.
        max_time: seconds, ``"10 min"``, ``"DD:HH:MM:SS"``, a timedelta, or a mapping for one.
        limit_train_batches: batches per rank and epoch: a number, or a fraction where a float is given.
        limit_val_batches: the same for each validation loader; 0 for no validation.
        limit_test_batches: the same for each loader of `test`.
        limit_predict_batches: the same for each loader of `predict`.
        overfit_batches: train on the same first batches in every epoch, as many as it says, and validate on as many.
        val_check_interval: batches between validations within an epoch, or a fraction (float); or ``"100 updates"``,
            ``"0.5 epochs"``, or a time as ``max_time`` has it. By default an epoch's end.
        check_val_every_n_epoch: validate in every n-th epoch only; None lets the interval's batches count on from epoch
            to epoch.
        num_sanity_val_steps: validation batches that are tried before training, 2 by default; -1 for all.
        fast_dev_run: run one batch (or n) of everything, without checkpoints and loggers, whatever else was given.
        barebones: nothing that costs: no logging at all, checkpoints, bar, summary and sanity check.
        log_every_n_steps: updates between rows of the loggers, 50 by default.
        accumulate_grad_batches: micro-batches of each rank in one update.
        global_batch_size: samples in one update over all ranks, instead of ``accumulate_grad_batches``.
        gradient_clip_val: the bound of the gradients' global norm, or of each element.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        on_skip: what a `training_step` that returns None does on several ranks: ``"update"`` skips it on all of them,
            ``"samples"`` goes on with the other ranks' samples. Declaring it costs one collective per update.
        uneven: for iterable data that ends at different times on different ranks: ``"error"``, ``"drop"``, ``"join"``.
        reload_dataloaders_every_n_epochs: ask the module or data module for its loaders again; 0 for never.
        exact_resume: refuse to go on from a checkpoint unless the run is then, to the bit, the one that was ended.
        deterministic: use deterministic algorithms only, and fix the order of reductions. ``"warn"`` where an operation
            has none, instead of an error.
        benchmark: let cuDNN choose algorithms by trying.
        detect_anomaly: find the operation whose gradient is NaN. Slow.
        inference_mode: validate, test and predict under ``torch.inference_mode``; ``torch.no_grad`` where it is False,
            within a fit, and under sharded strategies, which could not train after it.
        sync_batchnorm: batch statistics of all processes together.
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"``, or a `trivet.profilers.Profiler`.
        enable_model_summary: print the layers when a fit begins; by default where there is a bar.
        enable_checkpointing: add a `Checkpoint` callback where none is given.
        enable_progress_bar: show a bar on a terminal, quiet lines elsewhere, and first what was planned.
        default_root_dir: where runs are written; ``trivet_runs`` in the current directory by default. Of a URL such as
            ``s3://bucket/runs`` the checkpoints go there, and what loggers write into ``trivet_runs``.
        compile: compile the module's steps with `torch.compile`; a mapping holds options for it.
        return_weights: whether the caller's module holds the trained weights after a launched `fit`.
        resume: ``"auto"``: a `fit` goes on from the newest complete checkpoint of the newest run that trained the same
            thing here, in its directory, or begins afresh: the same command may be given until it ends.
        max_restarts: how often a `fit` starts its processes again when one of them fails, from the newest checkpoint.
        min_devices: go on with fewer devices, down to this number, when a process is lost for good; an update keeps its
            samples.
        timeout: end the run where a rank has not got on for so long, and say where it stands: seconds, ``"10 min"``, or
            what ``max_time`` may be. Longer than the longest step, batch, hook and save. None for never.
    """

    @known_arguments
    def __init__(
        self,
        *,
        accelerator: str | Accelerator | Mapping[str, Any] = "auto",
        strategy: str | Strategy | Mapping[str, Any] = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        node_rank: int | None = None,
        main_address: str | None = None,
        main_port: int | None = None,
        precision: str | int | Precision | Mapping[str, Any] | None = "fp32",
        launcher: str | Launcher | Mapping[str, Any] = "auto",
        comm_profile: str | None = None,
        plugins: Any = None,
        logger: flags.Loggers = None,
        callbacks: flags.Callbacks = None,
        max_epochs: int | str | None = None,
        min_epochs: int | str | None = None,
        max_steps: int | str | None = -1,
        min_steps: int | str | None = None,
        max_time: float | str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | str | None = 1.0,
        limit_val_batches: int | float | str | None = 1.0,
        limit_test_batches: int | float | str | None = 1.0,
        limit_predict_batches: int | float | str | None = 1.0,
        overfit_batches: int | float | str = 0.0,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | str | None = 1,
        num_sanity_val_steps: int | str | None = None,
        fast_dev_run: bool | int = False,
        barebones: bool = False,
        log_every_n_steps: int | str | None = None,
        accumulate_grad_batches: int | str = 1,
        global_batch_size: int | None = None,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        on_skip: str | None = None,
        uneven: str = "error",
        reload_dataloaders_every_n_epochs: int | str = 0,
        exact_resume: bool = False,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        inference_mode: bool = True,
        sync_batchnorm: bool = False,
        profiler: str | Profiler | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        default_root_dir: str | Path | None = None,
        compile: bool | Mapping[str, Any] = False,
        return_weights: bool = True,
        resume: str | None = None,
        max_restarts: int = 0,
        min_devices: int | None = None,
        timeout: float | str | timedelta | dict[str, int] | None = None,
    ) -> None:
        g = settle({name: value for name, value in locals().items() if name != "self"})
        from .profilers import PassThroughProfiler, make

        self.limits, self.val_fraction = flags.limits(**{name: g[name] for name in flags.LIMITS})
        self.val_check_interval = 1.0 if g["val_check_interval"] is None else g["val_check_interval"]
        self.limit_train_batches = flags.check_limit("limit_train_batches", g["limit_train_batches"])
        self.limit_val_batches = flags.check_limit("limit_val_batches", g["limit_val_batches"])
        self.limit_test_batches = flags.check_limit("limit_test_batches", g["limit_test_batches"])
        self.limit_predict_batches = flags.check_limit("limit_predict_batches", g["limit_predict_batches"])
        self.fast_dev_run, self.barebones, self.overfit_batches = g["fast_dev_run"], barebones, overfit_batches
        self.clip = flags.check_clip(gradient_clip_val, gradient_clip_algorithm or "norm")
        flags.check_accumulation(g["accumulate_grad_batches"], global_batch_size)
        flags.check_choice("on_skip", on_skip, (None, "update", "samples"))
        flags.check_choice("uneven", uneven, ("error", "drop", "join"))
        self.accumulate_grad_batches, self.global_batch_size = g["accumulate_grad_batches"], global_batch_size
        self.on_skip, self.uneven = on_skip, uneven
        self.reload_dataloaders_every_n_epochs, self.exact_resume = reload_dataloaders_every_n_epochs, exact_resume
        self.deterministic, self.benchmark, self.inference_mode = g["deterministic"], benchmark, inference_mode
        self.detect_anomaly, self.sync_batchnorm = detect_anomaly, sync_batchnorm
        self.default_root_dir = as_path(default_root_dir or "trivet_runs")
        self.local_root_dir = self.default_root_dir if isinstance(self.default_root_dir, Path) else Path("trivet_runs")
        self.return_weights = return_weights
        self.compile = flags.check_compile(compile)
        self.profiler: Profiler = make(profiler) or PassThroughProfiler()
        self._request: dict[str, Any] = {
            **{name: g[name] for name in ("accelerator", "strategy", "precision", "launcher")},
            "devices": devices,
            "num_nodes": num_nodes,
            "node_rank": node_rank,
            "main_address": main_address,
            "main_port": main_port,
            "comm_profile": comm_profile,
            "on_skip": on_skip,
            "accumulate": None if global_batch_size else accumulate_grad_batches,
            "global_batch_size": global_batch_size,
            "clip": self.clip,
            "deterministic": bool(g["deterministic"]),
            "returns_weights": return_weights,
        }
        self.resume, self.max_restarts, self.min_devices = resume, max_restarts, min_devices
        self.timeout = flags.seconds_of(timeout, "timeout")
        world = environments.detect()
        flags.check_going_on(resume, max_restarts, min_devices, world)
        if world is None and (max_restarts or min_devices is not None) and g["launcher"] == "auto":
            self._request["launcher"] = "trivet:local"  # also of a single process, which nobody else starts again
        resolved = self.resolve(None, world)
        flags.check_nodes(max_restarts, min_devices, bool(resolved.where))
        flags.check_min_devices(min_devices, resolved.plan.devices)
        self.enable_progress_bar, self.enable_checkpointing = g["enable_progress_bar"], g["enable_checkpointing"]
        self.loggers = flags.make_loggers(g["logger"], self.local_root_dir)
        self.callbacks = flags.make_callbacks(
            callbacks,
            checkpoint=self.enable_checkpointing,
            progress_bar=self.enable_progress_bar,
            summary=g["enable_model_summary"],
            fast=bool(self.fast_dev_run),
        )
        self.config: dict[str, Any] = {}  # the command line's, where there was one

        self.progress = Progress()
        self.resumed_from: str | None = None  # the checkpoint that a fit was told to go on from
        self.continues = False  # whether a fit goes on in the directory of an earlier run
        self.world = World()
        self.datamodule: DataModule | None = None
        self.should_stop = self.validation_due = False
        self.stage = ""
        self._module: Module | None = None
        self.forget_data()
        self.at_boundary = True
        self.logged_metrics: dict[str, float] = {}
        self._run: Run | None = None
        self._ended: Run | None = None  # the last fit's, so that it can be looked at and saved; else another job's
        self.final_metrics: dict[str, float] = {}
        self.final_shown: dict[str, float] = {}
        self._started = time.monotonic()

    # ---------------------------------------------------------------------------------------------------- to call

    def fit(
        self,
        module: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        resume: str | None = None,
    ) -> None:
        """Train; returns when training has ended, with the trained weights in ``module``.

        With several devices worker processes are started. What comes back from them is the module's state dict, the
        callbacks' state, the metrics, the progress and the checkpoints' paths; nothing else. A failure of a worker
        raises `RankFailed` here.

        Args:
            module: what to train.
            train_dataloaders: a DataLoader or another iterable of batches; or a method of the module or ``datamodule``.
            val_dataloaders: one or a list of them.
            datamodule: gives the loaders instead.
            ckpt_path: a checkpoint to go on from: a path, ``"last"`` or ``"best"`` of the Checkpoint callback; where
                this Trainer has saved none, of the newest run in its ``default_root_dir`` that did.
            resume: ``"auto"``, as the Trainer's.
        """
        from .job import Job

        resume = flags.check_resume(self.resume if resume is None else resume, ckpt_path)
        path = self._checkpoint(ckpt_path)
        job = Job("fit", module, train_dataloaders, val_dataloaders, None, datamodule, path, resume)
        self._ready(job)()

    def validate(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
    ) -> list[dict[str, float]]:
        """One pass over the validation data, each sample exactly once; returns one mapping of metrics per loader.

        Args:
            module: what to evaluate; by default the last fit's, with the weights of its best checkpoint, if it has one.
            dataloaders: a loader or a list of loaders; or a method of the module or ``datamodule``.
            datamodule: gives the loaders instead.
            ckpt_path: a checkpoint whose weights to use: a path, ``"last"`` or ``"best"``.
            verbose: print the metrics, on rank 0.
        """
        return self._evaluate("validate", module, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = False,
    ) -> list[dict[str, float]]:
        """`validate` with the module's ``test_step`` and the test data."""
        return self._evaluate("test", module, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        module: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
    ) -> list[Any] | None:
        """What ``predict_step`` returns of each batch, once and in the order of the data, on the CPU.

        A list with one entry per batch of the user's loader; a list of such lists where there are several loaders.
        Whatever the number of processes it is the same, on every rank. With ``return_predictions=False`` nothing is
        kept, for a `PredictionWriter`.
        """
        self._evaluate("predict", module, dataloaders, datamodule, ckpt_path, False, return_predictions)
        return self.predictions

    def _evaluate(
        self, stage: str, module: Module | None, dataloaders: Any, datamodule: DataModule | None,
        ckpt_path: str | Path | None, verbose: bool, return_predictions: bool = False,
    ) -> list[dict[str, float]]:  # fmt: skip
        from .job import Job

        if module is None:
            module = self.module
            callback = self.checkpoint_callback
            if ckpt_path is None and callback is not None and callback.best_model_path:
                ckpt_path = "best"
        path = self._checkpoint(ckpt_path)
        job = Job(stage, module, None, None, dataloaders, datamodule, path, return_predictions=return_predictions)
        self._ready(job)()
        from .session import by_loader

        found = by_loader(self.final_metrics)
        if verbose and self.is_global_zero:
            for number, metrics in enumerate(found):
                print(f"{stage} {number}:", ", ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
        return found

    def plan(self, module: Module | None = None) -> Plan:
        """What a `fit` of this module would be: printable, and checked. Starts nothing."""
        return self.resolve(module, environments.detect()).plan

    # -------------------------------------------------------------------------------------------------------- inside

    def resolve(self, module: Module | None, world: World | None, *, launched: bool = False) -> Resolved:
        """The plugins, made and negotiated, for a world that an environment or, where ``launched``, a launcher gave."""
        from .capabilities import AS_LAUNCHED, resolve

        manual = module is not None and not module.automatic_optimization
        request = self._request | (AS_LAUNCHED if launched else {})
        return resolve(world=world, manual=manual, **request)

    def use_devices(self, devices: int | Sequence[int], accumulate: int) -> None:
        """What `resolve` goes by from now on: other devices, for the same samples in an update."""
        self._request["devices"] = devices if isinstance(devices, int) else list(devices)
        if self.global_batch_size is None:
            self.accumulate_grad_batches = self._request["accumulate"] = accumulate

    def _checkpoint(self, path: str | Path | None) -> str | None:
        if path not in ("last", "best"):
            return None if path is None else str(path)
        callback = self.checkpoint_callback
        found = callback and (callback.last_model_path if path == "last" else callback.best_model_path)
        return str(found or path)  # else it is looked for, once, where the job begins

    def _ready(self, job: Job) -> Callable[[], Any]:
        """What is left to call when everything is checked: it runs the job here, or in processes that it starts."""
        if not isinstance(job.module, Module):
            raise ConfigurationError(f"expected a trivet.Module to {job.stage}, got {job.module!r}.")
        if "_hparams" not in vars(job.module):
            name = type(job.module).__name__
            raise ConfigurationError(f"{name}.__init__ does not call super().__init__(). Call it first.")
        world = environments.detect()
        resolved = self.resolve(job.module, world)
        job.check(self, resolved)
        job.seed = torch.initial_seed() & (2**63 - 1)
        if job.stage == "fit":
            flags.warn_of_no_limit(self.limits)
        self.should_stop, self._module, self.predictions = False, job.module, None
        self.resumed_from, self.continues = None, False
        self.callbacks = flags.with_those_of(job.module, self.callbacks)
        if self.enable_progress_bar and (world is None or world.rank == 0):
            print(resolved.plan.banner(), file=sys.stderr, flush=True)
        if world is None and resolved.launcher is not None:
            from .workers import launch

            return partial(launch, self, job, resolved)
        from .session import run

        return partial(run, self, job, resolved, world or World())
