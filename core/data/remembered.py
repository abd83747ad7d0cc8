"""What samplers remember from epoch to epoch, for a checkpoint: generators, counters, lists that they shuffle."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..checkpoint.plain import is_plain
from .sharding import OwnsPosition, samplers

_NUMBERS = (bool, int, float, str)  # what long lists hold, as a rule
_KNOWN = ("torch.utils.data.sampler", "torch.utils.data.distributed", "builtins")  # of these generators are all
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class Remembered:
    """The state of a loader's samplers, and of those that they hold in attributes.

    Stored are generators and what a sampler's own ``state_dict`` gives; of a sampler without one, the attributes with
    plain values, tensors and arrays that it has changed since the run began.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset = loader.dataset
        self._owners = {"loader": loader, **dict(_every_sampler(samplers(loader)))}
        self.generators = _find_generators(self._owners)
        samplers_ = {name: one for name, one in self._owners.items() if type(one).__module__ not in _KNOWN}
        del samplers_["loader"]
        self._own = {name: one for name, one in samplers_.items() if isinstance(one, OwnsPosition)}
        self._watched = {name: one for name, one in samplers_.items() if name not in self._own}
        self._began = {name: _copied(value) for name, value in self._attributes() if is_plain(value, _as_plain)}

    def generator_states(self) -> dict[str, Any]:
        return {name: _get_state(generator) for name, generator in self.generators.items()}

    def state(self) -> dict[str, Any]:
        """By the attribute that leads to it, as plain data."""
        changed = {
            name: _copied(value)
            for name, value in self._attributes()
            if not (name in self._began and _equal(value, self._began[name])) and is_plain(value, _as_plain)
        }
        own = {f"{name}.{OWN}": one.state_dict() for name, one in self._own.items()}
        return self.generator_states() | changed | own

    def load(self, state: dict[str, Any], *, generators_only: bool = False) -> None:
        for name in state.keys() & self.generators.keys():
            _set_state(self.generators[name], state[name])
        if generators_only:
            return
        for owner_name, owner in self._own.items():
            if (key := f"{owner_name}.{OWN}") in state:
                owner.load_state_dict(state[key])
        for owner_name, owner in self._watched.items():
            begin = f"{owner_name}."
            for key in state.keys() - self.generators.keys():
                name = key.removeprefix(begin)
                if key.startswith(begin) and "." not in name:
                    setattr(owner, name, _like(state[key], getattr(owner, name, None)))

    @property
    def unknown(self) -> str | None:
        """What a sampler holds that is not stored, so that the order of the next epochs may not follow from it."""
        for owner_name, owner in self._watched.items():
            for name, value in _items(owner):
                known = f"{owner_name}.{name}" in self.generators or isinstance(value, (Sampler, Dataset, *_CODE))
                if not known and value is not self._dataset and not is_plain(value, _as_plain):
                    return (
                        f"the sampler {type(owner).__name__} keeps {name!r}, a {type(value).__name__}, of which nobody "
                        "knows whether the order follows from it. Give the sampler state_dict() and load_state_dict() "
                        "(which may hold nothing), or let it keep plain values and generators"
                    )
        return None

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for owner_name, owner in self._watched.items():
            for name, value in _items(owner):
                yield f"{owner_name}.{name}", value


OWN = "state_dict()"


def _every_sampler(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    met: list[Any] = []
    waiting = list(found.items())
    while waiting:
        name, one = waiting.pop(0)
        if any(one is other for other in met):
            continue
        met.append(one)
        yield name, one
        waiting += [(f"{name}.{key}", value) for key, value in _items(one) if isinstance(value, Sampler)]


def _items(owner: Any) -> list[tuple[str, Any]]:
    return list(getattr(owner, "__dict__", {}).items())


def _as_plain(value: Any) -> Any:
    """A deque as a list, an array as a tensor, which may share its memory; anything else as it is."""
    if type(value) is deque:
        return list(value)
    if _is_array(value):
        with suppress(TypeError, ValueError):  # long doubles and other byte orders, which torch has not
            return torch.as_tensor(value if value.flags.carray else value.copy())  # torch has no negative strides
    return value


def _is_array(value: Any) -> bool:
    if type(value).__module__ != "numpy" or not hasattr(value, "tolist"):
        return False
    return getattr(getattr(value, "dtype", None), "kind", "") in "biufc"


def _copied(value: Any) -> Any:
    """As plain data, sharing nothing with what the sampler has."""
    if isinstance(value, dict):
        return type(value)((key, _copied(item)) for key, item in value.items())
    if isinstance(plain := _as_plain(value), Tensor):
        return plain.detach().clone()
    if isinstance(plain, (list, tuple, set)) and type(plain) is not torch.Size:
        return type(plain)(item if type(item) in _NUMBERS else _copied(item) for item in plain)
    return plain


def _like(stored: Any, here: Any) -> Any:
    """A stored value in the type that the sampler has."""
    if isinstance(stored, Tensor) and _is_array(here):
        array: Any = stored.numpy()
        return array.copy() if hasattr(here, "shape") and here.shape else type(here)(array)
    if type(here) is deque:
        return deque(stored, here.maxlen)
    return _copied(stored)


def _equal(one: Any, other: Any) -> bool:
    one, other = _as_plain(one), _as_plain(other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        try:
            return bool(one == other)
        except (RuntimeError, ValueError):  # tensors in them
            return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


# ----------------------------------------------------------------------------------------------------------- generators


def _find_generators(owners: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner_name, owner in owners.items():
        for name, value in _items(owner):
            known = any(value is other for other in found.values())
            if not known and (isinstance(value, (torch.Generator, random.Random)) or _is_numpy_generator(value)):
                found[f"{owner_name}.{name}"] = value
    return found


def _is_numpy_generator(value: Any) -> bool:
    if not type(value).__module__.startswith("numpy."):
        return False
    import numpy

    return isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _get_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    import numpy

    if isinstance(generator, numpy.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return _plain(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
        return
    import numpy

    if isinstance(generator, numpy.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _plain(state: Any) -> Any:
    # Arrays as lists, which numpy takes back: a checkpoint holds no numpy objects.
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
