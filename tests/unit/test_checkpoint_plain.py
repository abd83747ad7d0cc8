from __future__ import annotations

import enum
import io
import threading
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from trivet.checkpoint.plain import check_plain
from trivet.errors import ConfigurationError


class Color(enum.IntEnum):
    RED = 1


PLAIN = {
    "none": None,
    "numbers": [True, 1, 2.5, float("nan"), 1 + 2j, 10**30],
    "text": ("a", b"b"),
    "tensor": torch.ones(2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "torch": [torch.float32, torch.Size([2]), torch.device("cpu")],
    "dict": OrderedDict({1: {True: {2.5: {"a"}}}}),
}


def test_what_is_admitted_loads_with_weights_only() -> None:
    check_plain(PLAIN, "state")
    buffer = io.BytesIO()
    torch.save(PLAIN, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["dict"] == PLAIN["dict"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"A": {"lock": threading.Lock()}},
            r"callbacks\['A'\]\['lock'\] is a _thread.lock, which .* from state_dict\(\)",
        ),
        ({"A": [1, np.float32(2)]}, r"callbacks\['A'\]\[1\] is a numpy.float32, .* store value.item\(\)"),
        ({"A": np.float64(2)}, r"numpy.float64, .* store value.item\(\)"),
        ({"A": np.ones(2)}, r"numpy.ndarray, .* torch.from_numpy"),
        ({"A": Color.RED}, r"Color, .* store int\(value\)"),
        ({"A": defaultdict(int)}, r"collections.defaultdict, .* store dict\(value\)"),
        ({"A": frozenset("a")}, r"store set\(value\)"),
        ({"A": lambda: 0}, r"is a function"),
        ({"A": int}, r"is a type"),
        ({(1, 2): 0}, r"callbacks has the key \(1, 2\) of type tuple"),
        ({"A": torch.ones(1, device="meta")}, "meta device"),
        ({"A": torch.__version__}, r"TorchVersion, .* store str\(value\)"),
    ],
)
def test_what_is_refused_is_named(value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_plain(value, "callbacks")


def test_a_value_in_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(ConfigurationError, match=r"user\[0\] contains itself"):
        check_plain(value, "user")
