"""Environments: pure functions of the variables, asked one and all."""

import subprocess
import sys

import pytest
import trivet
from trivet.errors import ConfigurationError, PluginBroken, PluginInvalid, PluginNotFound
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


# ---------------------------------------------------------------------------------------------- of other distributions

MINE = """
    from trivet import Environment
    from trivet.launch.world import World

    class Mine(Environment):
        def detect(self, environ):
            return World(1, 4, 1, 2, 0, 2, address="10.0.0.1:7000") if environ.get("ACME_JOB") else None

        def reasons(self, environ):
            return ("ACME_JOB is set",) if environ.get("ACME_JOB") else ("ACME_JOB is not set",)
"""


def test_an_environment_of_another_distribution_is_asked(install):
    install("acme_cluster", "acme = acme_cluster:Mine", MINE, kind="environment")
    assert detect({}) is None
    assert detect({"ACME_JOB": "7"}) == World(1, 4, 1, 2, 0, 2, "acme", "10.0.0.1:7000")
    assert detect({"ACME_JOB": "7", "TRIVET_LAUNCH_DIR": "/x"}) is None
    assert detect(TORCHRUN) == World(5, 8, 1, 4, 1, 2, "torchrun")


def test_two_environments_at_once_are_an_error_that_names_both_and_can_be_chosen_between(install):
    install("acme_cluster", "acme = acme_cluster:Mine", MINE, kind="environment")
    both = TORCHRUN | {"ACME_JOB": "7"}
    with pytest.raises(ConfigurationError) as caught:
        detect(both)
    assert str(caught.value).startswith(
        "2 environments say that they started this process: environment 'acme' (acme_cluster 1.2) (ACME_JOB is set); "
        f"environment 'torchrun' (trivet {trivet.__version__}) (RANK=5 is set, WORLD_SIZE=8 is set, "
    )
    assert str(caught.value).endswith("or set TRIVET_ENVIRONMENT to the one that did: acme or torchrun.")
    assert detect(both | {"TRIVET_ENVIRONMENT": "acme"}).source == "acme"
    assert detect(both | {"TRIVET_ENVIRONMENT": "torchrun"}).source == "torchrun"
    assert detect(both | {"TRIVET_ENVIRONMENT": "none"}) is None
    with pytest.raises(
        ConfigurationError, match=r"='torchrun', but environment 'torchrun' \(.*\) did not start this proc"
    ):
        detect({"TRIVET_ENVIRONMENT": "torchrun"})
    with pytest.raises(PluginNotFound, match=r"no environment is named 'acne'\. Did you mean 'acme'"):
        detect({"TRIVET_ENVIRONMENT": "acne"})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no licence')", r"cannot be loaded .* It was not asked whether it started this process"),
        ("from trivet import Environment\nclass Mine(Environment): pass", "does not define detect, reasons"),
        (
            "from trivet import Environment\nclass Mine(Environment):\n    def detect(self): ...\n"
            "    def reasons(self, environ): ...",
            r"detect\(self\) cannot be called as detect\(self, environ",
        ),
    ],
)
def test_a_broken_environment_disturbs_no_run_but_is_named(install, code, message):
    install("acme_cluster", "acme = acme_cluster:Mine", code, kind="environment")
    with pytest.warns(UserWarning, match=message):
        assert detect(TORCHRUN) == World(5, 8, 1, 4, 1, 2, "torchrun")
    with pytest.raises((PluginBroken, PluginInvalid)):
        detect({"TRIVET_ENVIRONMENT": "acme"})


def test_an_environment_that_raises_or_answers_nonsense(install):
    install(
        "acme_cluster",
        "acme = acme_cluster:Mine",
        MINE.replace("return World", "1 / 0; return World"),
        kind="environment",
    )
    with pytest.raises(ConfigurationError, match=r"environment 'acme' \(acme_cluster 1.2\) raised ZeroDivisionError"):
        detect({})
    install("acme_other", "acme = acme_other:Mine", MINE.replace("else None", "else 3"), kind="environment")
    with pytest.raises(ConfigurationError, match=r"says that this process's world is 3\. Expected a World, or None"):
        detect({"TRIVET_ENVIRONMENT": "acme_other:acme"})


def test_asking_imports_no_torch():
    code = (
        "import sys; from trivet.launch.environments import detect\n"
        "assert detect({}) is None and 'trivet.launch.torchrun' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
