"""Lightning's constructors of strategies, accelerators and precisions: each makes a plugin of Trivet's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ... import registry, seeding
from .spelling import refuse

ALWAYS = "It is always so; leave it out."
BY_TRAINER = "Give it to the Trainer."
LAUNCHER = "Leave it out; how processes are started is Trainer(launcher=...)'s."


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed Python's, numpy's and torch's generators; without a seed from ``PL_GLOBAL_SEED``, else with 0."""
    return seeding.seed_everything(int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed)


def _made(kind: str, name: str, options: Mapping[str, Any]) -> Any:
    return registry.make(kind, {"name": name, **options}).plugin


def _checked(owner: str, given: Mapping[str, Any], harmless: tuple[str, ...], instead: Mapping[str, str]) -> None:
    """Refuse what a constructor of Lightning's takes and ours doesn't, unless it changes nothing or is not set."""
    for name, value in given.items():
        if name not in harmless and value is not None:
            refuse(owner, name, value, instead.get(name, "Leave it out, or look at `trivet plugins`."))


class DDPStrategy:
    """Makes Trivet's ``ddp``."""

    def __new__(
        cls,
        *,
        bucket_cap_mb: float | None = None,
        ddp_comm_hook: Any = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        **more: Any,
    ) -> Any:
        instead = {
            "accelerator": BY_TRAINER,
            "precision_plugin": BY_TRAINER,
            "timeout": "Set TORCH_DISTRIBUTED_DEFAULT_TIMEOUT or leave it out.",
            "process_group_backend": "The accelerator says it.",
            "ddp_comm_state": "Use strategy={'name': 'ddp', 'communication_hook': 'powersgd', 'powersgd_rank': ...}.",
            "model_averaging_period": "There is no local SGD; leave it out.",
        }
        _checked("DDPStrategy", more, ("start_method", "parallel_devices", "cluster_environment"), instead)
        options: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_size_mb": bucket_cap_mb}
        if ddp_comm_hook is not None:
            options["communication_hook"] = _hook(ddp_comm_hook)
        options |= {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
        }
        return _made("strategy", "ddp", options)


def _hook(function: Any) -> str:
    hooks = {"fp16_compress_hook": "fp16", "bf16_compress_hook": "bf16", "powerSGD_hook": "powersgd"}
    name = getattr(function, "__name__", "")  # a function of torch's
    if name not in hooks:
        refuse("DDPStrategy", "ddp_comm_hook", function, f"Allowed are torch's {', '.join(hooks)}.")
    return hooks[name]


class FSDPStrategy:
    """Makes Trivet's ``fsdp``, which is torch's FSDP2."""

    def __new__(
        cls,
        *,
        cpu_offload: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        **more: Any,
    ) -> Any:
        instead = {
            "accelerator": BY_TRAINER,
            "mixed_precision": "Use Trainer(precision='bf16-mixed').",
            "precision_plugin": BY_TRAINER,
            "device_mesh": "Use strategy={'name': 'fsdp', 'replicate': N} for N copies of the sharded model.",
            "activation_checkpointing": "Use activation_checkpointing_policy.",
        }
        harmless = (
            *("state_dict_type", "use_orig_params", "sync_module_states", "limit_all_gathers", "forward_prefetch"),
            *("backward_prefetch", "parallel_devices", "cluster_environment", "process_group_backend", "timeout"),
        )
        _checked("FSDPStrategy", more, harmless, instead)
        options: dict[str, Any] = {}
        if cpu_offload is not None:
            options["cpu_offload"] = bool(getattr(cpu_offload, "offload_params", cpu_offload))  # torch's CPUOffload
        kind = str(getattr(sharding_strategy, "name", sharding_strategy)).upper()  # torch's ShardingStrategy
        if kind not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            instead_of_kind = {"NO_SHARD": "Use strategy='ddp'."}.get(kind, instead["device_mesh"])
            refuse("FSDPStrategy", "sharding_strategy", kind, instead_of_kind)
        if kind == "SHARD_GRAD_OP":
            options["reshard_after_forward"] = False
        if activation_checkpointing_policy is not None:
            options["activation_checkpointing"] = True
        if auto_wrap_policy is not None:
            options["unit_classes"] = _classes(auto_wrap_policy)
        return _made("strategy", "fsdp", options)


def _classes(policy: Any) -> list[str]:
    if not isinstance(policy, (set, frozenset, list, tuple)) or not all(isinstance(cls, type) for cls in policy):
        instead = "Give a set of classes, or let the module's own method blocks() return the submodules to shard by."
        refuse("FSDPStrategy", "auto_wrap_policy", policy, instead)
    return sorted(cls.__name__ for cls in policy)


class DeepSpeedStrategy:
    """Makes Trivet's ``deepspeed``."""

    def __new__(
        cls, *, stage: int | None = None, offload_optimizer: bool = False, config: Any = None, **more: Any
    ) -> Any:
        advice = "Write it into a DeepSpeed file, and give that as config=."
        _checked("DeepSpeedStrategy", more, ("parallel_devices", "cluster_environment"), dict.fromkeys(more, advice))
        options = {"stage": stage, "offload_optimizer": offload_optimizer or None, "config": config}
        return _made("strategy", "deepspeed", {name: value for name, value in options.items() if value is not None})


class SingleDeviceStrategy:
    """Makes Trivet's ``single``."""

    def __new__(cls, device: Any = "cpu", **more: Any) -> Any:
        if str(device) != "cpu":
            refuse("SingleDeviceStrategy", "device", device, "Use Trainer(accelerator='cuda', devices=[0]).")
        _checked("SingleDeviceStrategy", more, (), dict.fromkeys(more, BY_TRAINER))
        return _made("strategy", "single", {})


class CPUAccelerator:
    def __new__(cls) -> Any:
        return _made("accelerator", "cpu", {})


class CUDAAccelerator:
    def __new__(cls) -> Any:
        return _made("accelerator", "cuda", {})


class MPSAccelerator:
    def __new__(cls) -> Any:
        return _made("accelerator", "mps", {})


class XLAAccelerator:
    def __new__(cls, **options: Any) -> Any:
        return _made("accelerator", "xla", options)


class MixedPrecision:
    """Makes ``fp16-mixed`` or ``bf16-mixed``."""

    def __new__(cls, precision: str = "16-mixed", device: str | None = None, scaler: Any = None) -> Any:
        if scaler is not None:
            refuse("MixedPrecision", "scaler", scaler, "Leave it out: loss scaling is a part of 'fp16-mixed'.")
        return _made("precision", precision, {})


class HalfPrecision:
    """Makes ``fp16-true`` or ``bf16-true``."""

    def __new__(cls, precision: str = "16-true") -> Any:
        return _made("precision", precision, {})


class DoublePrecision:
    def __new__(cls) -> Any:
        return _made("precision", "fp64", {})


class TorchSyncBatchNorm:
    """In ``plugins`` it means ``sync_batchnorm=True``."""
