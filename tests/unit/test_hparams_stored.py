"""Which hyperparameters a checkpoint holds."""

import functools
import sys

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


class Act(nn.Module):
    """Of the same package as `Made`."""


class Other:
    pass


class Mine(Other):
    pass


def harmless():
    pass


class Takes(trivet.Module):
    def __init__(self, what=harmless, kind: type[Other] | None = None, act=None):
        super().__init__()
        self.what, self.kind, self.act = what, kind, act


def load(tmp_path, cls, **references):
    hparams = {name: {"import_path": path} for name, path in references.items()}
    state = TrainState(module=dict(cls().state_dict()), hparams=hparams)
    writing.write(tmp_path / "saved", state, rank=0, world_size=1)
    return cls.load_from_checkpoint(tmp_path / "saved")


HERE = __name__


@pytest.mark.parametrize(
    "path",
    [
        "os:system", "builtins:eval", "builtins:exec", "subprocess:Popen", "torch.serialization:load", "torch.hub:load",
        "torch.nn.functional:importlib.import_module", "torch.nn.functional:warnings.warn", f"{HERE}:writing.write",
        f"{HERE}:harmless", f"{HERE}:Mine", "torch.nn.modules.module:Module.load_state_dict", "torch.nn.modules:math.e",
        "shutil:rmtree", "os.path:os.system", "no_such_module:Linear", "pdb:run", "", ":", "os:", "torch:nn",
        "torch:from_file", "torch:load", "torch:compile",
        "torch.utils.cpp_extension:load", "torch.distributed.nn.api.remote_module:RemoteModule",
    ],
)  # fmt: skip
def test_a_checkpoint_names_no_code_that_is_not_harmless(tmp_path, path):
    before = set(sys.modules)
    with pytest.raises(CheckpointError, match=r"the hyperparameter 'act' is .* Pass act=\.\.\., or allow it"):
        load(tmp_path, Takes, act=path)
    assert set(sys.modules) - before <= {name for name in sys.modules if name.startswith("torch")}


def test_what_a_checkpoint_may_name(tmp_path):
    found = load(tmp_path, Takes, what=f"{HERE}:harmless", kind=f"{HERE}:Mine", act="torch.nn.modules.activation:GELU")
    assert (found.what, found.kind, found.act) == (harmless, Mine, nn.GELU)
    assert load(tmp_path, Takes, act="torch.nn.functional:relu").act is nn.functional.relu
    assert load(tmp_path, Takes, act="torch.optim.adamw:AdamW").act is torch.optim.AdamW
    assert load(tmp_path, Takes, act=f"{HERE}:Act").act is Act
    with torch.serialization.safe_globals([Mine]):
        assert load(tmp_path, Takes, act=f"{HERE}:Mine").act is Mine
    with pytest.raises(CheckpointError, match="a checkpoint may not choose"):
        load(tmp_path, Takes, kind=f"{HERE}:harmless")


def test_activations_and_dtypes_come_back(tmp_path):
    given = {
        "kind": nn.GELU,
        "act": nn.functional.softplus,
        "f": nn.functional.relu,
        "dtype": torch.bfloat16,
        "w": 3,
        "g": torch.tanh,
        "h": nn.functional.gelu,
    }
    plain = plain_hparams(given)
    state = TrainState(module={}, hparams=plain)

    class Any_(trivet.Module):
        def __init__(self, **given):
            super().__init__()
            self.given = given

    writing.write(tmp_path / "saved", state, rank=0, world_size=1)
    assert Any_.load_from_checkpoint(tmp_path / "saved").given == given
