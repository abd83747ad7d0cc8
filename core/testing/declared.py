"""What every plugin says of itself, and what of it can be judged before anything runs.

Each check takes what the registry made and raises AssertionError. They run in the launching process.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from ..combination import KINDS
from ..plugin_checks import sets_interface
from ..plugins import INTERFACE, Choice, Needs, Policy, Scaling
from ..registry import Selected
from .checks import close
from .reference import Recipe, train
from .tolerance import Terms

PLAIN = (str, int, float, bool, type(None))
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def interface(selected: Selected, terms: Terms) -> None:
    """The plugin speaks this Trivet's interface, and one that is installed says so itself."""
    spoken = type(selected.plugin).interface
    assert spoken == INTERFACE, f"it speaks interface {spoken!r}, this Trivet {INTERFACE}"
    said = selected.distribution in ("trivet", "local") or sets_interface(type(selected.plugin), selected.kind)
    assert said, (
        f"its class does not set interface, and so claims to speak whatever Trivet is installed: set it to {INTERFACE}"
    )


def options(selected: Selected, terms: Terms) -> None:
    """Constructor arguments are attributes of the same name; `options` is plain, and makes the same plugin again."""
    plugin = selected.plugin
    parameters = inspect.signature(type(plugin)).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in NAMED]
    missing = [name for name in names if not hasattr(plugin, name)]
    assert not missing, f"the constructor's arguments {missing} are not kept as attributes of the same name"
    said = plugin.options()
    assert isinstance(said, dict), f"options() is {said!r}, expected a mapping of the constructor's arguments"
    assert set(said) == set(names), f"options() names {sorted(said)}, the constructor {sorted(names)}"
    odd = {name: value for name, value in said.items() if not isinstance(value, PLAIN)}
    assert not odd, f"options() holds {odd!r}; expected text, numbers, booleans or None"
    if all(isinstance(getattr(plugin, name), PLAIN) for name in names):
        again = type(plugin)(**said).options()
        assert again == said, f"made again from its own options {said!r} it says {again!r}"


def capabilities(selected: Selected, terms: Terms) -> None:
    """`needs` and `offers` are frozensets of text, and the same whenever they are asked for."""
    plugin = selected.plugin
    assert isinstance(plugin.needs, Needs), f"needs is {plugin.needs!r}, expected a trivet.plugins.Needs"
    for what, names in [("offers", plugin.offers), *((f"needs.{kind}", getattr(plugin.needs, kind)) for kind in KINDS)]:
        assert isinstance(names, frozenset), f"{what} is {names!r}, expected a frozenset of text"
        assert all(isinstance(name, str) for name in names), f"{what} is {names!r}, expected a frozenset of text"
    assert (plugin.needs, plugin.offers) == (plugin.needs, plugin.offers), "needs or offers differ when asked again"


def launching(selected: Selected, terms: Terms) -> None:
    """Making the plugin and asking it what negotiation asks leaves the launching process as it was.

    No device context, no process group, the same environment and default dtype.
    """
    before = _process(selected)
    plugin = type(selected.plugin)(**selected.options) if _can_be_made_again(selected) else selected.plugin
    _ask(selected.kind, plugin)
    changed = [what for what, value in _process(selected).items() if value != before[what]]
    assert not changed, f"in the launching process it changes {', '.join(changed)}"


def _can_be_made_again(selected: Selected) -> bool:
    return all(isinstance(getattr(selected.plugin, name, ...), PLAIN) for name in selected.options)


def _ask(kind: str, plugin: Any) -> None:
    _ = plugin.needs, plugin.offers, plugin.options()
    if kind == "accelerator":
        _ = plugin.device_type, plugin.collective_backend
        if plugin.is_available():
            plugin.device_count()
        else:
            plugin.unavailable_reason()
    elif kind == "precision":
        _ = plugin.policy, plugin.scaling
    else:
        plugin.mesh_dims(1), plugin.notes(1, False), list(plugin.refuses(Choice()))


def _process(selected: Selected) -> Mapping[str, Any]:
    kind = getattr(selected.plugin, "device_type", "cuda")
    device = None if kind == "cpu" else getattr(torch, kind, None)
    context = getattr(device, "is_initialized", None)
    return {
        "the device's context": None if context is None else context(),
        "the process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "the environment": dict(os.environ),
        "the default dtype": torch.get_default_dtype(),
        "the random numbers": torch.get_rng_state().tolist(),
    }


def travels(selected: Selected, terms: Terms) -> None:
    """The plugin can be handed to worker processes, which is what happens when it is given as an object."""
    try:
        again = cloudpickle.loads(cloudpickle.dumps(selected.plugin))
    except Exception as error:
        raise AssertionError(f"it cannot be pickled for the workers: {type(error).__name__}: {error}") from error
    assert again.options() == selected.plugin.options(), "its options differ after it was handed to a worker"


def tolerance(selected: Selected, terms: Terms) -> None:
    """A declared tolerance is narrow enough that training which hears nothing of half the samples fails it."""
    own = terms.tolerance
    if own is None:
        return
    recipe = Recipe()
    right, wrong = train(recipe, 2), train(Recipe(deaf=True), 2)
    try:
        close(wrong.first_gradients, right.first_gradients, own.gradients, "first gradients")
        close(wrong.losses, right.losses, own.losses, "losses")
    except AssertionError:
        return
    raise AssertionError(f"{own} is so wide that gradients of half the samples pass for those of all; narrow it")


# ------------------------------------------------------------------------------------------------------ of one kind


def layout(selected: Selected, terms: Terms) -> None:
    """What a strategy says before launch has the form that the Plan wants."""
    plugin = selected.plugin
    for world_size in (1, 2, 4) if "several_processes" in plugin.offers else (1,):
        try:
            mesh = plugin.mesh_dims(world_size)
        except Exception:
            continue  # how a strategy says that it cannot be laid out over so many processes; negotiation refuses it
        assert math.prod(mesh.values()) == world_size, f"mesh_dims({world_size}) is {mesh!r}"
        notes = plugin.notes(world_size, False)
        assert all(isinstance(note, str) for note in notes), f"notes() gives {notes!r}, expected sentences"
        for refusal in plugin.refuses(Choice(world_size=world_size)):
            assert [type(part) for part in refusal] == [str, str], f"refuses() gives {refusal!r}, expected two texts"


def policy(selected: Selected, terms: Terms) -> None:
    """The dtypes are dtypes, and the accelerator is asked for those that not every device has."""
    plugin = selected.plugin
    found, scaling = plugin.policy, plugin.scaling
    assert isinstance(found, Policy), f"policy is {found!r}, expected a trivet.plugins.Policy"
    dtypes = {"param": found.param, "compute": found.compute, "reduce": found.reduce}
    odd = {name: value for name, value in dtypes.items() if not isinstance(value, torch.dtype)}
    assert not odd, f"policy has {odd!r}, expected torch dtypes"
    assert plugin.policy == found, f"policy is {found!r} and then {plugin.policy!r}"
    for dtype in {found.param, found.compute} - {torch.float32}:
        name = str(dtype).removeprefix("torch.")
        asked = {f"dtype:{name}", f"autocast:{name}"} & plugin.needs.accelerator
        assert asked, f"policy has {name}, and needs.accelerator does not ask for 'dtype:{name}' or 'autocast:{name}'"
    if scaling is not None:
        assert isinstance(scaling, Scaling), f"scaling is {scaling!r}, expected a trivet.plugins.Scaling or None"
        sensible = scaling.initial > 0 and scaling.growth >= 1 and 0 < scaling.backoff < 1
        assert sensible, f"{scaling!r} cannot work"
        wants = plugin.needs.strategy
        assert "loss_scaling" in wants, "it scales losses, and needs.strategy does not ask for 'loss_scaling'"


def conversion(selected: Selected, terms: Terms) -> None:
    """`convert` stores floats as the policy says and leaves integers; also of a module on the meta device."""
    for device in ("cpu", "meta"):
        with torch.device(device):
            net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        names = [name for name, _ in net.named_parameters()]
        converted = selected.plugin.convert(net)
        assert [name for name, _ in converted.named_parameters()] == names, "convert() renames parameters"
        wanted = selected.plugin.policy.param
        for name, param in converted.named_parameters():
            stored = f"policy.param is {wanted}, and convert() stores {name!r} as {param.dtype}"
            assert param.dtype == wanted, f"{stored} on the {device} device"
            assert param.device.type == device, f"convert() moves {name!r} from the {device} device to {param.device}"
        count = converted.get_buffer("1.num_batches_tracked")
        assert count.dtype == torch.int64, f"convert() makes a buffer of int64 {count.dtype}"


def batches(selected: Selected, terms: Terms) -> None:
    """`cast_batch` keeps the nesting and everything that is not a float; the context can be entered again and again."""
    plugin = selected.plugin
    ids, given = torch.arange(3), torch.rand(3)
    cast = plugin.cast_batch({"ids": ids, "pair": (given, "text"), "list": [given, 2]})
    shape = {"ids": torch.Tensor, "pair": (torch.Tensor, str), "list": [torch.Tensor, int]}
    found = {
        "ids": type(cast["ids"]), "pair": tuple(map(type, cast["pair"])), "list": [type(part) for part in cast["list"]]
    }  # fmt: skip
    assert found == shape, f"cast_batch() changes the nesting: {found!r}, expected {shape!r}"
    assert cast["ids"].dtype == torch.int64, "cast_batch() changes integers"
    assert torch.equal(cast["ids"], ids), "cast_batch() changes integers"
    context = plugin.forward_context("cpu")
    for _ in range(2 if context is not None else 0):
        with context:
            pass
    default = torch.get_default_dtype()
    assert default == torch.float32, f"forward_context leaves the default dtype at {default}"


Declared = Callable[[Selected, Terms], None]
COMMON: tuple[Declared, ...] = (interface, options, capabilities, launching, travels, tolerance)
DECLARED: Mapping[str, tuple[Declared, ...]] = {
    "strategy": (*COMMON, layout),
    "accelerator": COMMON,
    "precision": (*COMMON, policy, conversion, batches),
}
