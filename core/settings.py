"""The Trainer's arguments taken together: defaults, modes that set several at once, and contradictions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from . import registry
from .errors import ConfigurationError
from .intervals import numbers
from .loggers.logger import Silent

F = TypeVar("F", bound=Callable[..., Any])

# Arguments of Lightning's Trainer, also of older ones, that this one does not have, and what to use instead.
INSTEAD = {
    "use_distributed_sampler": "Nothing is needed: samples are dealt among processes, whatever the sampler; a loader "
    "that shards itself is left alone",
    "replace_sampler_ddp": "Nothing is needed: samples are dealt among processes, whatever the sampler",
    "enable_autolog_hparams": "Hyperparameters go to the loggers unless save_hyperparameters(logger=False)",
    "model_registry": "Give ckpt_path a path",
    "suggest_integrations": "Nothing is suggested",
    "gpus": "accelerator='cuda', devices=N",
    "tpu_cores": "accelerator='xla', devices=N",
    "num_processes": "accelerator='cpu', devices=N",
    "resume_from_checkpoint": "trainer.fit(module, ckpt_path=...)",
    "auto_lr_find": "A learning-rate finder is a callback's work",
    "auto_scale_batch_size": "global_batch_size=N keeps the update's size whatever the number of processes",
    "checkpoint_callback": "enable_checkpointing=False, or callbacks=[Checkpoint(...)]",
    "weights_summary": "enable_model_summary=False, or callbacks=[ModelSummary(max_depth=...)]",
    "progress_bar_refresh_rate": "callbacks=[ProgressBar(refresh_interval=...)]",
    "process_position": "callbacks=[ProgressBar(...)]",
    "weights_save_path": "default_root_dir=..., or Checkpoint(dirpath=...)",
    "stochastic_weight_avg": "callbacks=[StochasticWeightAveraging(...)]",
    "amp_backend": "precision='bf16-mixed' or 'fp16-mixed'",
    "amp_level": "precision='bf16-mixed' or 'fp16-mixed'",
    "track_grad_norm": "gradient_clip_val logs the norm as grad_norm; else log it in on_before_optimizer_step",
    "terminate_on_nan": "detect_anomaly=True, or callbacks=[EarlyStopping(check_finite=True)]",
    "multiple_trainloader_mode": "trivet.CombinedLoader(loaders, mode=...)",
    "flush_logs_every_n_steps": "A logger's own argument",
    "log_gpu_memory": "callbacks=[DeviceStatsMonitor()]",
    "prepare_data_per_node": "prepare_data runs once per machine",
    "move_metrics_to_cpu": "Metrics stay on the device and are read when a row is written",
    "auto_select_gpus": "devices=[...] names them",
    "sync_batch_norm": "sync_batchnorm=True",
}

LOUD = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def known_arguments(init: F) -> F:
    """Answer an argument that ``init`` does not have with the nearest one it has, or with what to use instead."""
    parameters = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        if args:
            raise ConfigurationError(f"Trainer({args[0]!r}, ...): its arguments have names, such as max_epochs=3.")
        for name in given:
            if name not in parameters:
                raise UnknownArgument(unknown(name, parameters))
        init(self, **numbers(given))

    return checked  # type: ignore[return-value]


class UnknownArgument(ConfigurationError, TypeError):
    """The Trainer has no argument of that name."""


def unknown(name: str, known: Iterable[str]) -> str:
    """What to say of an argument that is not known."""
    known = list(known)
    if name in INSTEAD:
        return f"Trainer has no argument {name!r}. {INSTEAD[name]}."
    near = get_close_matches(name, known, n=1) or [one for one in known if name in one or one in name][:1]
    hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(sorted(known))}."
    return f"Trainer has no argument {name!r}. {hint}"


def settle(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with their defaults, with those that a mode sets, and with the plugins of ``plugins``.

    Raises ConfigurationError where two of them contradict each other, or one could only be ignored.
    """
    given = given | {"deterministic": given["deterministic"] or False}
    given["precision"] = "fp32" if given["precision"] is None else given["precision"]
    place_plugins(given)
    check_type("deterministic", given["deterministic"], (True, False, "warn"))
    for name in ("detect_anomaly", "sync_batchnorm", "barebones", "inference_mode", "exact_resume"):
        check_type(name, given[name], (True, False))
    for name in (*LOUD, "benchmark"):
        check_type(name, given[name], (True, False, None))
    if given["deterministic"] and given["benchmark"]:
        raise ConfigurationError(
            "deterministic and benchmark=True contradict each other: cuDNN's trying may choose another algorithm each "
            "time. Leave out one of them."
        )
    number = given["reload_dataloaders_every_n_epochs"]
    if type(number) is not int or number < 0:
        raise ConfigurationError(f"reload_dataloaders_every_n_epochs={number!r}: expected a whole number from 0 up.")
    if given["barebones"]:
        strip(given)
    overfit(given)
    for name in LOUD[:2]:
        given[name] = True if given[name] is None else given[name]
    if given["enable_model_summary"] is None:
        given["enable_model_summary"] = given["enable_progress_bar"]
    fast = given["fast_dev_run"]
    if isinstance(fast, float) or int(fast) < 0:
        raise ConfigurationError(f"fast_dev_run={fast!r}: expected True, False or a number of batches.")
    if fast:
        wanted = given["logger"] not in (False, [])
        given |= run_fast(int(fast)) | {"logger": Silent() if wanted else False}
    return given


def check_type(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
        raise ConfigurationError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}.")


def run_fast(batches: int) -> dict[str, Any]:
    """What ``fast_dev_run`` sets, whatever was given."""
    limits = {f"limit_{stage}_batches": batches for stage in ("train", "val", "test", "predict")}
    return limits | {
        "fast_dev_run": batches, "max_epochs": 1, "max_steps": batches, "min_epochs": None, "min_steps": None,
        "val_check_interval": 1.0, "check_val_every_n_epoch": 1, "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }  # fmt: skip


def strip(given: dict[str, Any]) -> None:
    """What ``barebones`` turns off; asking for one of these too is a contradiction."""
    for name, off in (*((name, False) for name in LOUD), ("logger", False), ("num_sanity_val_steps", 0)):
        if given[name] not in (None, off):
            raise ConfigurationError(f"barebones=True and {name}={given[name]!r} contradict each other.")
        given[name] = off
    for name in ("profiler", "fast_dev_run", "detect_anomaly"):
        if given[name]:
            raise ConfigurationError(f"barebones=True and {name}={given[name]!r} contradict each other.")


def overfit(given: dict[str, Any]) -> None:
    """``overfit_batches`` limits training and validation."""
    value = given["overfit_batches"]
    if not value:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return
        raise ConfigurationError(f"overfit_batches={value!r}: expected a number of batches, or a fraction.")
    for name in ("limit_train_batches", "limit_val_batches"):
        if given[name] not in (None, 1.0) or type(given[name]) is int:
            raise ConfigurationError(
                f"overfit_batches={value!r} and {name}={given[name]!r} contradict each other: one sets the other."
            )
        given[name] = value
    if given["fast_dev_run"]:
        raise ConfigurationError("overfit_batches and fast_dev_run contradict each other: both say how many batches.")


TAKEN_BY = {"logger": "logger", "callback": "callbacks"}
DEFAULTS = {"strategy": "auto", "accelerator": "auto", "precision": "fp32", "launcher": "auto"}


def place_plugins(given: dict[str, Any]) -> None:
    """Put each object of ``plugins`` where its kind belongs."""
    plugins = given.pop("plugins")
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]:
        kind = registry.kind_of(plugin)
        if kind is None or kind not in DEFAULTS:
            where = "A name belongs to the argument of its kind."
            if kind in TAKEN_BY:
                where = f"It belongs to {TAKEN_BY[kind]}=."
            if kind == "environment":
                where = "An environment is found by itself; one that a package registers is asked too."
            raise ConfigurationError(
                f"plugins={plugin!r}: expected objects of a Strategy, Accelerator, Precision or Launcher. {where}"
            )
        if given[kind] != DEFAULTS[kind]:
            raise ConfigurationError(f"{kind}={given[kind]!r} and the {kind} in plugins={plugin!r}: give one of them.")
        given[kind] = plugin
