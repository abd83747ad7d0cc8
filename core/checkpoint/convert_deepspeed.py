"""The folder that strategy deepspeed writes into a checkpoint, as optimizer state by parameter name.

DeepSpeed lays the trainable parameters of each group one after the other into a flat tensor and cuts that into as many
equal parts as there are ranks (stages 1 and 2), or cuts each parameter so and lays out the parts (stage 3). Each rank's
file holds its part of the float32 weights and of every tensor of the optimizer's state. The weights are put together in
the same way and compared with those in the checkpoint: a layout that is not understood is found out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..state import TrainState
from . import directory as storage
from .convert import Report

OWN = "own_folder"  # in the stored list of optimizers, see `capture`
CLASSES = (  # of DeepSpeed's, which lie in its files beside plain data
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_WRAPPED = "module."  # what DeepSpeed's engine sees of the module's names begins so


class _Inert:
    """What stands for an object of DeepSpeed's."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.values = state


def read_deepspeed(source: Path) -> tuple[TrainState, Report]:
    """The whole state of a checkpoint of strategy deepspeed, and what of it was taken over."""
    state = storage.read(source)
    folder = next((one[OWN] for one in state.optimizers if OWN in one), None)
    if folder is None:
        raise CheckpointError(
            f"strategy {state.plan.get('strategy')!r} wrote it as any strategy reads it: there is nothing to convert"
        )
    if not isinstance(folder, str) or Path(folder).name != folder:
        raise CheckpointError(f"its optimizer state is said to lie in {folder!r}, which is no folder in it")
    place = source / folder
    about = json.loads((place / "about.json").read_text(encoding="utf-8"))
    stage, world_size = int(about["stage"]), int(about["world_size"])
    masters, optimizer = _stage_0(place, state.module) if stage == 0 else _sharded(place, stage, world_size)
    for name, master in masters.items():
        stored = state.module.get(name)
        if stored is None or not torch.equal(master.to(stored.dtype), stored):
            raise CheckpointError(
                f"DeepSpeed's copy of the weight {name!r} is not the weight that the checkpoint holds: its layout is "
                "one that is not known"
            )
    state = replace(state, module={**state.module, **masters}, optimizers=[optimizer])
    taken = [
        f"the optimizer state of {len(optimizer['state'])} parameters, from stage {stage} on {world_size} process(es)",
        "all that the checkpoint held outside of DeepSpeed's folder",
    ]
    if any(tensor.dtype != torch.float32 for tensor in state.module.values()) or about["parameters"] != "float32":
        taken.append("the weights in float32, as DeepSpeed steps them")
    left = ["a dynamic loss scale, if there was one"] if about["parameters"] == "float16" else []
    return state, Report(f"strategy deepspeed, stage {stage}", tuple(taken), tuple(left))


def _load(file: Path) -> Any:
    stand_ins: list[Any] = [(_Inert, name) for name in CLASSES]
    try:
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing in DeepSpeed's folder") from None
    except Exception as error:
        raise CheckpointError(f"{file.name} cannot be loaded: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------------ stages 1, 2, 3


def _sharded(place: Path, stage: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The float32 weights and the optimizer state, by name."""
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    if (place / f"state/bf16_{name.format(0)}").exists():
        name = f"bf16_{name}"
    ranks = [_load(place / "state" / name.format(rank))["optimizer_state_dict"] for rank in range(world_size)]
    first = "zero_pp_rank_0_" if stage == 3 else ""
    about_model = _load(place / f"state/{first}mp_rank_00_model_states.pt")
    if (about_model["ds_config"].get("zero_optimization") or {}).get("round_robin_gradients"):
        raise CheckpointError("DeepSpeed's round_robin_gradients changes the order of parameters, which is not read")
    shapes = [_names(group) for group in about_model["param_shapes"]]
    flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    groups = ranks[0][inner]["param_groups"]
    if len(groups) != len(shapes):
        raise CheckpointError(f"DeepSpeed's optimizer has {len(groups)} groups, and its parameters {len(shapes)}")
    together = _of_cut_parameters if stage == 3 else _of_cut_groups
    masters = dict(together(shapes, [rank[flat] for rank in ranks]))
    state: dict[str, dict[str, Any]] = {name: {} for name in masters}
    keys = {key: value for values in ranks[0][inner]["state"].values() for key, value in values.items()}
    for key, example in keys.items():
        if isinstance(example, Tensor) and example.dim():
            parts = [[rank[inner]["state"][number][key] for number in range(len(rank[flat]))] for rank in ranks]
            for name, tensor in together(shapes, parts):
                state[name][key] = tensor
        else:
            for number, group in enumerate(shapes):
                for name in group:
                    value = ranks[0][inner]["state"][number][key]
                    state[name][key] = value.clone() if isinstance(value, Tensor) else value
    return masters, {"state": state, "groups": [_group(g, list(s)) for g, s in zip(groups, shapes, strict=True)]}


def _names(shapes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(_WRAPPED): tuple(shape) for name, shape in shapes.items()}


def _group(options: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {**{key: value for key, value in options.items() if key != "params"}, "params": names}


def _of_cut_groups(shapes: list[dict[str, tuple[int, ...]]], parts: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """``parts`` by rank and group; what is left at the end of a group is padding."""
    for number, group in enumerate(shapes):
        whole = torch.cat([rank[number].flatten() for rank in parts])
        start = 0
        for name, shape in group.items():
            yield name, whole[start : start + prod(shape)].reshape(shape).clone()
            start += prod(shape)


def _of_cut_parameters(
    shapes: list[dict[str, tuple[int, ...]]], parts: list[list[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """``parts`` by rank; a rank's parts of all parameters follow one another, of equal length on all ranks."""
    ranks = [torch.cat([part.flatten() for part in rank]) for rank in parts]
    start = 0
    for group in shapes:
        for name, shape in group.items():
            length = ceil(prod(shape) / len(ranks))
            whole = torch.cat([rank[start : start + length] for rank in ranks])
            yield name, whole[: prod(shape)].reshape(shape).clone()
            start += length


# ------------------------------------------------------------------------------------------------------------- stage 0


def _stage_0(place: Path, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Nothing is cut, and nothing has a name: the float32 copies are found again among the weights, in their order."""
    stored = _load(place / "state/mp_rank_00_model_states.pt")["optimizer"]
    free = dict(weights)
    masters: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    groups = []
    inner = stored["optimizer_state_dict"]
    for options, copies in zip(inner["param_groups"], stored["fp32_groups"], strict=True):
        here = []
        for number, copy in zip(options["params"], copies, strict=True):
            name = next(
                (n for n, w in free.items() if w.shape == copy.shape and torch.equal(copy.to(w.dtype), w)), None
            )
            if name is None:
                raise CheckpointError(f"no weight is DeepSpeed's parameter {number} of shape {tuple(copy.shape)}")
            del free[name]
            masters[name] = copy.detach()
            names[number] = name
            here.append(name)
        groups.append(_group(options, here))
    return masters, {"state": {names[number]: dict(v) for number, v in inner["state"].items()}, "groups": groups}
