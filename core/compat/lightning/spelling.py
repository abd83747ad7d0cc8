"""Lightning's names of strategies and precisions, and its Trainer arguments, in Trivet's words."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

from ... import registry
from ...errors import ConfigurationError, PluginError
from ...trainer import Trainer

DDP, UNUSED = "ddp", {"name": "ddp", "find_unused_parameters": True}
STRATEGIES: dict[str, Any] = {
    **{f"ddp_{way}": DDP for way in ("spawn", "fork", "notebook", "find_unused_parameters_false")},
    **{f"ddp{way}_find_unused_parameters_false": DDP for way in ("_spawn", "_fork", "_notebook")},
    **{f"ddp{way}_find_unused_parameters_true": UNUSED for way in ("", "_spawn", "_fork", "_notebook")},
    "fsdp_cpu_offload": {"name": "fsdp", "cpu_offload": True},
    **{f"deepspeed_stage_{stage}": {"name": "deepspeed", "stage": stage} for stage in (1, 2, 3)},
    **{
        f"deepspeed_stage_{stage}_offload": {"name": "deepspeed", "stage": stage, "offload_optimizer": True}
        for stage in (1, 2, 3)
    },
    "single_device": "single",
}
CLASSES = {
    "DDPStrategy": "ddp",
    "FSDPStrategy": "fsdp",
    "DeepSpeedStrategy": "deepspeed",
    "SingleDeviceStrategy": "single",
}
NO_STRATEGY = {
    "dp": "Use 'ddp'.",
    "model_parallel": "Use 'fsdp'; there is no tensor parallelism.",
    "deepspeed_stage_3_offload_nvme": "Give a DeepSpeed file: {'name': 'deepspeed', 'config': 'ds.json'}.",
    **dict.fromkeys(("xla", "xla_debug", "single_xla", "single_tpu"), "Use 'ddp' or 'single' with accelerator='xla'."),
}
NO_PRECISION = dict.fromkeys(
    ("transformer-engine", "transformer-engine-float16"),
    "Use 'bf16-mixed', or a precision that another package brings: `trivet plugins precision` lists them.",
)

# Arguments that Lightning's Trainer has, or had once.
NO_ARGUMENT = {
    "gpus": "Use accelerator='gpu', devices=...",
    "num_processes": "Use accelerator='cpu', devices=...",
    "tpu_cores": "Use accelerator='tpu', devices=...",
    "auto_lr_find": "Give the learning rate as an argument; there is no search for it.",
    "auto_scale_batch_size": "Use global_batch_size=..., which keeps the size of an update on any number of devices.",
    "resume_from_checkpoint": "Use fit(..., ckpt_path=...).",
    "progress_bar_refresh_rate": "Use enable_progress_bar, or callbacks=[TQDMProgressBar(refresh_rate=...)].",
    "weights_summary": "Use enable_model_summary, or callbacks=[ModelSummary(max_depth=...)].",
    "checkpoint_callback": "Use enable_checkpointing.",
    "weights_save_path": "Use callbacks=[ModelCheckpoint(dirpath=...)].",
    "replace_sampler_ddp": "Leave it out: data is dealt among processes whatever the sampler.",
    "track_grad_norm": "Log grad_norm(self, 2) in on_before_optimizer_step.",
    "terminate_on_nan": "Use detect_anomaly=True, or EarlyStopping(check_finite=True).",
    "amp_backend": "Leave it out; precision says it all.",
    "flush_logs_every_n_steps": "Use CSVLogger(flush_logs_every_n_steps=...).",
    "stochastic_weight_avg": "Use callbacks=[StochasticWeightAveraging(swa_lrs=...)].",
    "multiple_trainloader_mode": "Give fit a CombinedLoader(loaders, mode=...).",
    "model_registry": "There is none; give ckpt_path a path.",
    "use_distributed_sampler": (
        "Samples are dealt among processes whatever the sampler, each exactly once. For a loader that deals by itself, "
        "give trivet.data.sharding.already_sharded(loader)."
    ),
    "enable_autolog_hparams": "Call save_hyperparameters(logger=False) in the module.",
}


def refuse(owner: str, name: str, value: Any, instead: str) -> NoReturn:
    raise ConfigurationError(f"{owner}({name}={value!r}) is Lightning's, and Trivet has no such thing. {instead}")


def strategy(given: Any) -> Any:
    """A strategy, of whatever form; in files also a mapping with the ``class_path`` of a class of Lightning's."""
    if isinstance(given, Mapping) and "class_path" in given:
        name = CLASSES.get(str(given["class_path"]).rpartition(".")[2])
        return given if name is None else {**given, "class_path": name}
    if not isinstance(given, str):
        return given
    if given in NO_STRATEGY:
        refuse("Trainer", "strategy", given, NO_STRATEGY[given])
    return STRATEGIES.get(given, given)


def precision(given: Any) -> Any:
    if isinstance(given, str) and given in NO_PRECISION:
        refuse("Trainer", "precision", given, NO_PRECISION[given])
    return given


def duration(given: Any) -> Any:
    """A dict of hours, minutes, ... as the timedelta that it stands for."""
    return timedelta(**given) if isinstance(given, Mapping) else given


def arguments(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What `trivet.Trainer` takes, of what Lightning's was given; arguments at Lightning's defaults are left out."""
    found = {name: value for name, value in given.items() if value is not None and value != defaults.get(name)}
    for name in NO_ARGUMENT.keys() & found:
        refuse("Trainer", name, found[name], NO_ARGUMENT[name])
    off = [name for name, value in found.items() if not value and name in defaults and name not in _ours()]
    found = {name: value for name, value in found.items() if name not in off}  # what there is no switch for is off
    spell = {"strategy": strategy, "precision": precision, "max_time": duration, "val_check_interval": duration}
    found = {name: spell[name](value) if name in spell else value for name, value in found.items()}
    if given.get("check_val_every_n_epoch", 1) is None:  # Lightning's way to say that the interval goes over epochs
        found["check_val_every_n_epoch"] = None
    return found | plugins(found.pop("plugins", None))


@cache
def _ours() -> frozenset[str]:
    return frozenset(inspect.signature(Trainer).parameters)


def plugins(given: Any) -> dict[str, Any]:
    """Lightning's ``plugins``, each under the argument that is for it here."""
    from .plugins import TorchSyncBatchNorm

    found: dict[str, Any] = {}
    for one in given if isinstance(given, (list, tuple)) else [] if given is None else [given]:
        if isinstance(one, TorchSyncBatchNorm):
            found["sync_batchnorm"] = True
            continue
        try:
            found["precision"] = registry.make("precision", one).plugin
        except (ConfigurationError, PluginError):
            refuse("Trainer", "plugins", one, "Only a precision can be given so; leave it out.")
    return found
