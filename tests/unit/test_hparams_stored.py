"""Which hyperparameters a checkpoint holds."""

import functools

import pytest
import torch
import trivet
from torch import nn
from trivet.capture import plain_hparams
from trivet.checkpoint import writing
from trivet.errors import CheckpointError
from trivet.state import TrainState


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


class Made(trivet.Module):
    def __init__(self, kind=nn.Linear):
        super().__init__()
        self.save_hyperparameters()
        self.layer = kind(1, 1)


def test_what_is_given_is_not_imported(tmp_path):
    state = TrainState(module=dict(Made().state_dict()), hparams={"kind": {"import_path": "no_such_module:Linear"}})
    writing.write(tmp_path / "saved", state, rank=0, world_size=1)
    with pytest.raises(CheckpointError, match=r"'kind' is no_such_module:Linear, .* Pass kind=\.\.\."):
        Made.load_from_checkpoint(tmp_path / "saved")
    assert Made.load_from_checkpoint(tmp_path / "saved", kind=nn.Linear).layer.in_features == 1
