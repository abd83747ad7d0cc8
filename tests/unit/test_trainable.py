"""Whether parameters were frozen, unfrozen, added or taken out is seen without a walk over them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from trivet.trainable import Trainable
from trivet.trainable import trainable as of_root


def trainable(net, before):
    return of_root(net, before, lambda root: root)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.head = nn.Linear(2, 1)
        self.head.bias.requires_grad_(False)


CHANGES = {
    "frozen": lambda net: net.body[0].weight.requires_grad_(False),
    "unfrozen": lambda net: net.head.bias.requires_grad_(True),
    "a layer more": lambda net: net.body.append(nn.Linear(2, 2)),
    "a parameter more": lambda net: setattr(net, "scale", nn.Parameter(net.head.weight.detach().clone())),
    "a layer less": lambda net: net.body.pop(2),
    "a parameter less": lambda net: delattr(net.head, "weight"),
    "an equal parameter": lambda net: setattr(net.head, "weight", nn.Parameter(net.head.weight.detach().clone())),
    "another layer": lambda net: setattr(net, "head", nn.Linear(2, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    net = Net()
    found = trainable(net, None)
    assert found == {param for param in net.parameters() if param.requires_grad}
    assert trainable(net, found) is found
    CHANGES[change](net)
    again = trainable(net, found)
    assert again is not found
    assert again == {param for param in net.parameters() if param.requires_grad} != found
    assert trainable(net, again) is again


def test_what_a_strategy_set_itself_is_looked_at_anew():
    net = Net()
    assert type(trainable(net, set(net.parameters()))) is Trainable


def test_a_copy_is_a_plain_set():
    found = trainable(Net(), None)
    assert type(copy.deepcopy(found)) is type(pickle.loads(pickle.dumps(found))) is set


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_has_no_dicts():
    net = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), nn.Linear(2, 1))
    found = trainable(net, None)
    assert len(found) == 6
    assert trainable(net, found) is found
    getattr(net[0], "0").weight = nn.Parameter(torch.ones(2, 2))
    again = trainable(net, found)
    assert again == set(net.parameters()) != found
    next(net[0].parameters()).requires_grad_(False)
    assert len(trainable(net, again)) == 5
