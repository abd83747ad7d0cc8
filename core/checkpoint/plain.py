"""Which values a checkpoint can hold beside tensors: those that load again with ``weights_only=True``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigurationError

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_KEYS = (str, int, float, bool)


def check_plain(value: Any, where: str) -> None:
    """Raise `ConfigurationError` if ``value`` is not plain data, naming the place of the first thing that isn't.

    Plain are None, bool, int, float, complex, str, bytes, tensors, ``torch.Size``, ``torch.dtype``, ``torch.device``,
    and lists, tuples, sets, dicts and OrderedDicts of plain data with str, int, float or bool keys. Subclasses are not
    plain: loading gives back their base or refuses them. ``where`` names the value in the message, as ``"callbacks"``.
    """
    _check(value, where, (), lambda foreign: foreign)


def is_plain(value: Any, as_plain: Callable[[Any], Any]) -> bool:
    """Whether `check_plain` has nothing against ``value``; of what it refuses ``as_plain(value)`` counts."""
    try:
        _check(value, "", (), as_plain)
    except ConfigurationError:
        return False
    return True


def _check(value: Any, where: str, outer: tuple[int, ...], as_plain: Callable[[Any], Any]) -> None:
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind is Tensor or kind is torch.nn.Parameter:
        if value.is_meta:
            raise ConfigurationError(f"{where} is a tensor on the meta device, which has no values to store")
        return
    if id(value) in outer:
        raise ConfigurationError(f"{where} contains itself, which a checkpoint cannot hold")
    if kind is list or kind is tuple or kind is set:
        for index, item in enumerate(value):
            if type(item) not in _SCALARS:  # of which there may be millions
                _check(item, f"{where}[{index}]", (*outer, id(value)), as_plain)
    elif kind is dict or kind is OrderedDict:
        for key, item in value.items():
            if type(key) not in _KEYS:
                raise ConfigurationError(
                    f"{where} has the key {key!r} of type {_name(key)}; a checkpoint can hold dicts whose keys are "
                    "str, int, float or bool"
                )
            if type(item) not in _SCALARS:
                _check(item, f"{where}[{key!r}]", (*outer, id(value)), as_plain)
    elif (plain := as_plain(value)) is not value:
        _check(plain, where, (*outer, id(value)), as_plain)
    else:
        raise ConfigurationError(f"{where} is a {_name(value)}, which a checkpoint cannot hold; {_remedy(value)}")


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _remedy(value: object) -> str:
    if isinstance(value, np.ndarray):
        return "store torch.from_numpy(array) or array.tolist()"
    if isinstance(value, np.generic):
        return "store value.item()"
    if isinstance(value, Tensor):
        return "store a plain tensor"
    for base in (bool, int, float, str, bytes, dict, list, tuple):
        if isinstance(value, base):
            return f"store {base.__name__}(value)"
    if isinstance(value, frozenset):
        return "store set(value)"
    return "return plain data (numbers, strings, tensors, lists, tuples and dicts of them) from state_dict()"
