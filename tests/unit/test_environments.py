"""The torchrun environment: a pure function of the variables."""

import pytest
from trivet.errors import ConfigurationError
from trivet.launch.environments import detect
from trivet.launch.world import World

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


def test_torchrun_variables_become_a_world():
    assert detect(TORCHRUN) == World(5, 8, 1, 4, 1, 2, "torchrun")


def test_nodes_follow_from_the_ranks_where_they_are_not_given():
    variables = {name: value for name, value in TORCHRUN.items() if not name.startswith("GROUP")}
    assert detect(variables) == World(5, 8, 1, 4, 1, 2, "torchrun")


@pytest.mark.parametrize(
    "variables",
    [{}, {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, {"RANK": ""}, TORCHRUN | {"TRIVET_LAUNCH_DIR": "/x"}],
    ids=["nothing", "only the address", "empty", "inside a local worker"],
)
def test_no_launcher(variables):
    assert detect(variables) is None


@pytest.mark.parametrize(
    "missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_half_set_variables_are_an_error_that_names_the_missing(missing):
    variables = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigurationError, match=f"there is no {missing}\\."):
        detect(variables)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
    ],
)
def test_values_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigurationError, match=message):
        detect(TORCHRUN | change)
