"""Which hyperparameters a checkpoint holds."""

import functools

import pytest
import torch
from torch import nn
from trivet.capture import plain_hparams


def test_what_has_no_import_path_is_left_out_with_one_warning():
    def local():
        pass

    given = {
        "width": 3, "activation": torch.nn.functional.gelu, "kind": nn.Linear, "local": local, "bound": lambda x: x,
        "partial": functools.partial(print), "layer": nn.Linear(1, 1),
    }  # fmt: skip
    with pytest.warns(
        UserWarning, match=r"not stored in checkpoints: \['local', 'bound', 'partial', 'layer'\]"
    ) as said:
        plain = plain_hparams(given)
    assert len(said) == 1
    assert plain.keys() <= {"width", "activation", "kind"}
    assert plain["kind"] == {"import_path": "torch.nn.modules.linear:Linear"}
