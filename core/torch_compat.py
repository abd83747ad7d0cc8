"""Private parts of PyTorch that have no public way. Nothing else in Trivet reads another object's private attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

# What `CommDebugMode`, torch's public counter of collectives, is made of; it keeps no dtypes.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def remove_fully_shard(module: nn.Module) -> None:
    """Undo what `fully_shard` did to the classes and hooks of a module's parts; parameters are left as they are.

    torch has no reverse of ``fully_shard`` (pytorch/pytorch#114299 has the API's discussion): a module on which it was
    called can't be sharded again, copied, or used after its process group is gone.
    """
    from torch.distributed import _composable_state
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for part in list(module.modules()):
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            part.__dict__.pop(name, None)
        if not isinstance(part, FSDPModule):
            continue
        state = fully_shard.state(part)  # type: ignore[attr-defined]
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.9 has one: _fsdp_param_group
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                for handles in (
                    group._module_to_pre_save_state_dict_hook_handle,
                    group._module_to_pre_load_state_dict_hook_handle,
                ):
                    for handle in handles.values():
                        handle.remove()
        part.__class__ = type(part).__mro__[2]
        for key in (STATE_KEY, REGISTRY_KEY):
            part.__dict__.pop(key, None)
        _composable_state._module_state_mapping.pop(part, None)


def set_update_count(metric: object, count: int) -> None:
    """Say how many updates the accumulators hold that were put into a metric of torchmetrics.

    torchmetrics 1.9 has ``update_count`` to read and, for metrics that are restored, no way to set it: a state dict
    leaves it out, ``compute`` then warns, and metrics with mean states average wrongly from there on.
    """
    metric._update_count = count  # type: ignore[attr-defined]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody registered a hook on a module itself, which goes with it where the module is replaced."""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def collectives_begun() -> int:
    """How many collectives of the default process group this rank has begun, those that C++ calls included.

    torch keeps the number for its own reports of ranks out of step (``TORCH_DISTRIBUTED_DEBUG``, flight recorder), and
    shows it in none of its public functions. Counting calls instead would mean to wrap each of them.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 0
    try:
        return int(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    except RuntimeError:  # a backend that has no numbers
        return 0


def generator_address(generator: torch.Generator) -> int:
    """Where the C++ object of a generator lies. Its state can be had as a tensor only, which takes 10 microseconds, and
    `seeding.host_mark` looks at it several times in each step. Raises AttributeError where torch says no address."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def registries(module: nn.Module) -> list[Mapping[str, Any]]:
    """The dicts in which a module and all its parts keep parameters and parts: live, to be looked at again and again.
    Those of a ``torch.jit.ScriptModule`` are no dicts, but have ``values`` and the like.

    torch has public walks over them (``named_parameters``, ``children``), which take 0.5 us and more for each entry,
    and public hooks on registration, which do not tell what is taken out.
    """
    return [table for part in module.modules() for table in (part._parameters, part._modules)]


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written to, as autograd counts it.

    Its notes describe the counter, and there is no public way to read it. Otherwise every gradient would have to be
    watched by a hook, to know whether a backward has added to it.
    """
    return tensor._version
