"""A Lightning ``.ckpt`` file as a `TrainState`."""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..configured import Schedule, read_optimizers
from ..errors import CheckpointError, ConfigurationError
from ..state import Progress, TrainState
from .convert import Report, imported
from .plain import check_plain

_KNOWN = {  # what Lightning itself writes; other keys are of the user's `on_save_checkpoint` or the data module
    *("callbacks", "datamodule_hparams_name", "datamodule_hyper_parameters", "epoch", "global_step", "hparams_name"),
    *("hparams_type", "hyper_parameters", "loops", "lr_schedulers", "MixedPrecision", "native_amp_scaling_state"),
    *("optimizer_states", "pytorch-lightning_version", "state_dict"),
}
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_COMPILED = "_orig_mod."


@dataclass
class _Notes:
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def read_lightning(source: Path, model: str | None) -> tuple[TrainState, Report]:
    """The state, and what of the file it holds. ``model``: the import path of the module's class."""
    stored = load_lightning(source)
    notes = _Notes()
    state = TrainState(plan={"converted_from": f"Lightning {stored.get('pytorch-lightning_version', '(unknown)')}"})
    state.module = {name.replace(_COMPILED, ""): tensor for name, tensor in stored["state_dict"].items()}
    notes.taken.append(f"{len(state.module)} weights and buffers")
    state.progress = _progress(stored, notes).to_dict()
    state.hparams = _plain_part(stored.get("hyper_parameters") or {}, "hyperparameter", notes)
    state.user = _plain_part({k: v for k, v in stored.items() if k not in _KNOWN}, "entry", notes)
    module: Any = _module(model, state.hparams, state.module) if model else None
    optimizers, schedules = read_optimizers(module.configure_optimizers(), module) if module is not None else ([], [])
    _take_optimizers(state, stored.get("optimizer_states") or [], module, optimizers, notes)
    _take_schedulers(state, stored, optimizers, schedules, notes)
    scaler = stored.get("MixedPrecision") or stored.get("native_amp_scaling_state")
    if scaler:
        state.scaler = {"scale": float(scaler["scale"]), "good_updates": int(scaler["_growth_tracker"])}
        notes.taken.append(f"the loss scale, {state.scaler['scale']:g}")
    notes.left += [f"the state of the callback {name}" for name in stored.get("callbacks") or {}]
    notes.left.append(
        "the order of the samples: the file holds no seed. An epoch that had begun begins anew, in the order of seed "
        f"{state.seed}"
    )
    return state, Report(state.plan["converted_from"], tuple(notes.taken), tuple(notes.left))


def load_lightning(source: Path) -> dict[str, Any]:
    """The file's content, if it is plain data and a Lightning checkpoint."""
    if source.suffix == ".safetensors":
        raise CheckpointError(
            "it holds weights alone. Load them into the module: "
            "module.load_state_dict(safetensors.torch.load_file(path))"
        )
    if not zipfile.is_zipfile(source):
        raise CheckpointError("it is no file that torch.save has written")
    try:
        stored = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(_refusal(source, error)) from error
    weights = stored.get("state_dict") if isinstance(stored, dict) else None
    if not isinstance(weights, Mapping) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise CheckpointError("it is no checkpoint of Lightning's: it has no 'state_dict' of tensors")
    return dict(stored)


def _refusal(source: Path, error: Exception) -> str:
    try:
        needed = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    except Exception:  # it is damaged
        needed = []
    if not needed:
        return f"it cannot be loaded: {type(error).__name__}: {str(error).splitlines()[0]}"
    flags = " ".join(f"--allow {name}" for name in needed)
    return (
        f"loading it would make objects of {', '.join(needed)}, which may run code of whoever wrote the file. If you "
        f"trust it, convert it with {flags}, which calls torch.serialization.add_safe_globals for them."
    )


# ------------------------------------------------------------------------------------------------------------ the parts


def _progress(stored: Mapping[str, Any], notes: _Notes) -> Progress:
    """An epoch has ended where its last batch has been processed; Lightning may count it a little later."""
    epoch, steps = int(stored.get("epoch", 0)), int(stored.get("global_step", 0))
    loop = (stored.get("loops") or {}).get("fit_loop") or {}
    batches = loop.get("epoch_loop.batch_progress") or {}
    epochs = (loop.get("epoch_progress") or {}).get("current") or {}
    ended = bool(batches.get("is_last_batch")) and epochs.get("processed", epoch) == epochs.get("ready", epoch + 1) - 1
    completed = int(epochs.get("processed", epoch)) + ended
    several = len(stored.get("optimizer_states") or []) or 1
    progress = Progress(epoch=completed, update=steps // several)
    between = completed >= int(epochs.get("ready", 0))
    progress.earlier = progress.validated = int(batches.get("total", {}).get("processed", 0)) if between else 0
    progress.validated_update = progress.update
    notes.taken.append(f"epochs completed: {progress.epoch}; updates: {progress.update}")
    if several > 1:
        notes.left.append(
            f"global_step={steps} counts the steps of {several} optimizers; updates are taken to be a {several}th of it"
        )
    if not between:
        done = batches.get("current", {}).get("processed", 0)
        notes.left.append(f"the {done} batches of epoch {completed} that had been trained on: it begins anew")
    return progress


def _plain_part(values: Mapping[str, Any], what: str, notes: _Notes) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        try:
            check_plain(value, str(name))
            kept[str(name)] = value
        except ConfigurationError as error:
            notes.left.append(f"the {what} {error}")
    if kept:
        plural = {"entry": "entries"}.get(what, f"{what}s")
        notes.taken.append(f"{plural}: {', '.join(kept)}")
    return kept


def _module(path: str, hparams: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    cls = imported(path)
    parameters = inspect.signature(cls).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    module: nn.Module = cls(**{name: value for name, value in hparams.items() if takes_all or name in parameters})
    if configure := getattr(module, "configure_model", None):
        configure()
    if set(module.state_dict()) != set(weights):
        odd = sorted(set(module.state_dict()) ^ set(weights))
        raise CheckpointError(f"--model {path} has other weights than the file: {', '.join(odd[:6])}")
    module.load_state_dict(weights)
    return module


def _take_optimizers(
    state: TrainState, stored: list[dict[str, Any]], module: nn.Module | None, optimizers: list[Any], notes: _Notes
) -> None:
    if module is not None and len(optimizers) != len(stored):
        raise CheckpointError(f"it holds {len(stored)} optimizers, and configure_optimizers made {len(optimizers)}")
    found = []
    for number, packed in enumerate(stored):
        if module is not None:
            known = {param: name for name, param in module.named_parameters()}
            order = [known.get(param) for group in optimizers[number].param_groups for param in group["params"]]
            names = None if None in order else [str(name) for name in order]
        else:
            names = names_by_shape(packed, state.module) if len(stored) == 1 else None
        numbers = [n for group in packed["param_groups"] for n in group["params"]]
        if names is None or len(names) != len(numbers):
            notes.left.append(
                f"the state of {'the optimizer' if len(stored) == 1 else 'the optimizers'}: the file numbers the "
                "parameters, and which is which cannot be told. Give --model package.module.Class, whose "
                "configure_optimizers tells it. As it is, the checkpoint gives weights and does not resume a fit"
            )
            return
        by_number = dict(zip(numbers, names, strict=True))
        groups = [{**group, "params": [by_number[n] for n in group["params"]]} for group in packed["param_groups"]]
        found.append({"state": {by_number[n]: dict(v) for n, v in packed["state"].items()}, "groups": groups})
        how = "--model" if module is not None else "order and shapes"
        notes.taken.append(f"the state of optimizer {number}, its {len(names)} parameters named by {how}")
    state.optimizers = found


def names_by_shape(packed: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[str] | None:
    """The names of an optimizer's parameters, if it can only be all of the module's in their order, in one group.

    Statistics of batch norms are no parameters. Tied weights have one number and several names: the first counts.
    """
    if len(packed["param_groups"]) != 1:
        return None
    pointers: set[tuple[int, int, torch.Size]] = set()
    names = []
    for name, tensor in weights.items():
        where = (tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), tensor.shape)
        if not name.endswith(_BUFFERS) and tensor.is_floating_point() and where not in pointers:
            pointers.add(where)
            names.append(name)
    if len(names) != len(packed["param_groups"][0]["params"]):
        return None
    for number, name in zip(packed["param_groups"][0]["params"], names, strict=True):
        tensors = [v for v in packed["state"].get(number, {}).values() if isinstance(v, Tensor) and v.dim()]
        if any(tensor.shape != weights[name].shape for tensor in tensors):
            return None
    return names


def _take_schedulers(
    state: TrainState,
    stored: Mapping[str, Any],
    optimizers: list[Any],
    schedules: list[Schedule],
    notes: _Notes,
) -> None:
    """Lightning saves at an epoch's end before it steps the schedules of epochs, so that these are one behind."""
    state.schedulers = [dict(one) for one in stored.get("lr_schedulers") or []]
    for number, saved in enumerate(state.schedulers):
        known = schedules[number] if number < len(schedules) else None
        what = f"the state of scheduler {number}"
        if saved.get("last_epoch") != state.progress["epoch"] - 1 or (known and known.interval != "epoch"):
            notes.taken.append(what)
        elif known is None or known.wants_metric or not state.optimizers:
            notes.taken.append(what)
            notes.left.append(f"the last epoch's step of scheduler {number}, which Lightning makes after saving")
        else:
            for optimizer, one in zip(optimizers, state.optimizers, strict=True):
                for group, values in zip(optimizer.param_groups, one["groups"], strict=True):
                    group.update({key: value for key, value in values.items() if key != "params"})
            known.scheduler.load_state_dict(saved)
            known.scheduler.optimizer.zero_grad()
            known.scheduler.optimizer.step()  # changes nothing without gradients; torch wants it to come first
            known.scheduler.step()
            state.schedulers[number] = known.scheduler.state_dict()
            for optimizer, one in zip(optimizers, state.optimizers, strict=True):
                for group, values in zip(optimizer.param_groups, one["groups"], strict=True):
                    values.update({key: value for key, value in group.items() if key != "params"})
            notes.taken.append(f"{what}, stepped for the epoch that had ended, which Lightning does after saving")
