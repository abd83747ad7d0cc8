"""The pytest plugin as a stranger meets it: another directory, another process, nothing of this repository."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

OWN = """
    import torch
    from trivet.plugins import Accelerator, Needs, Policy, Precision, Strategy
    from trivet.testing import AcceleratorSuite, PrecisionSuite, StrategySuite, Tolerance

    class Mine(Strategy):
        def __init__(self, averages: bool = True) -> None:
            self.averages = averages

        def reduce_(self, parameters):
            if self.averages:
                super().reduce_(parameters)

    class Half(Precision):
        policy = Policy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        needs = Needs(accelerator=frozenset({"dtype:bfloat16"}))

        def convert(self, module):
            return module
"""


@pytest.fixture(autouse=True)
def _settings(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = -p no:cacheprovider")


def test_a_suite_in_a_test_file_needs_three_lines(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        OWN
        + """
    class TestMine(StrategySuite):
        plugin = Mine
        world_sizes = (1, 2)
        precisions = ("fp32",)
        tolerance = Tolerance(1e-6, 1e-5, 1e-5, 1e-5)
    """
    )
    result = pytester.runpytest_subprocess("-v", "-k", "says or W2-parity or W1-overflow")
    assert result.parseoutcomes()["passed"] == 8
    result.stdout.fnmatch_lines(
        [
            "*::TestMine::test_trains_like_the_reference[[]Mine-fp32-W2-parity] PASSED*",
            "| Mine | fp32 | cpu | 1 of 1 ok (own tolerance) |",
            "- Mine, by itself: 7 of 7 ok",
            "1 checks in cells ran, 0 were left out.",
        ]
    )


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_a_strategy_that_does_not_average_is_named_with_what_it_offers(pytester: pytest.Pytester, mode: str) -> None:
    pytester.makepyfile(
        OWN
        + """
    class TestMine(StrategySuite):
        plugin = Mine(averages=False)
        world_sizes = (2,)
        precisions = ("fp32",)
    """
    )
    result = pytester.runpytest_subprocess("--import-mode", mode, "-k", "parity")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(
        [
            "strategy 'Mine' (local*) offers 'several_processes' and does not train like the reference with it "
            "(parity in Mine-fp32-W2):",
            "losses: *",
            "| Mine | fp32 | cpu | FAILED: parity |",
        ]
    )


def test_a_precision_that_stores_something_else_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        OWN
        + """
    class TestHalf(PrecisionSuite):
        plugin = Half()
        strategies = ("single",)
        world_sizes = (1,)

    class Absent(Accelerator):
        device_type, collective_backend = "cpu", None

        def is_available(self): return False
        def unavailable_reason(self): return "it was not plugged in"
        def device_count(self): return 0
        def device(self, local_rank): raise AssertionError

    class TestAbsent(AcceleratorSuite):
        plugin = Absent
        strategies, precisions, world_sizes = ("single",), ("fp32",), (1,)
    """
    )
    result = pytester.runpytest_subprocess("-rs", "-k", "conversion or W1-parity or Absent and untried")
    outcomes = result.parseoutcomes()
    assert (outcomes["failed"], outcomes["skipped"]) == (2, 1)
    result.stdout.fnmatch_lines(
        ["*accelerator 'Absent' (local*) is not available here: it was not plugged in; neither*"]
    )
    result.stdout.no_fnmatch_line("*FAILED: untried*")
    result.stdout.fnmatch_lines(
        [
            "precision 'Half' (local*): policy.param is torch.bfloat16, and convert() stores '0.weight' as *float32*",
            "precision 'Half' (local*) does not train like the reference (parity in single-Half-W1):",
            "*PlanMismatch: the first update did not do what the Plan says:",
            "*parameter 'offset' is stored as float32, planned bfloat16",
        ]
    )


def test_a_suite_whose_plugin_does_not_exist_fails_and_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
    from trivet.testing import PrecisionSuite, StrategySuite

    class TestMine(PrecisionSuite):
        plugin = "fp23"

    class TestOther(StrategySuite):
        plugin = "dpd"

    class TestGood(PrecisionSuite):
        plugin = "fp32"
    """
    )
    result = pytester.runpytest_subprocess("-k", "loads or policy")
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (1, 2), "one broken class ends no other"
    result.stdout.fnmatch_lines(["TestMine: no precision is named 'fp23'. Did you mean 'fp32'? *"])


# --------------------------------------------------------------------------------------------------------- the options


def test_a_name_on_the_command_line_needs_no_file_and_runs_nothing_else(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_of_the_directory(): assert False")
    result = pytester.runpytest_subprocess(
        "-v", "--trivet-strategy", "single", "--trivet-precision", "fp32", "-k", "says"
    )
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes.get("failed")) == (7 + 9, None)
    result.stdout.fnmatch_lines(
        ["trivet.testing::TestStrategy_single::test_says_what_is_true[[]single-options] PASSED*"]
    )


def test_with_a_path_the_options_add_to_it(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile("def test_that_says_nothing(): pass")
    result = pytester.runpytest_subprocess(path, "--trivet-accelerator", "cpu", "-k", "says")
    assert result.parseoutcomes()["passed"] == 1 + 6


def test_an_unknown_name_is_a_usage_error_with_the_nearest_one(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--trivet-strategy", "dpd")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: no strategy is named 'dpd'. Did you mean 'ddp'? Available: *"])


def test_the_cover_leaves_out_most(pytester: pytest.Pytester) -> None:
    options = ("--trivet-accelerator", "cpu", "--trivet-cells", "cover", "--collect-only", "-q")
    result = pytester.runpytest_subprocess(*options)
    chosen = sum("test_trains" in line for line in result.outlines)
    left_out = next(int(found[1]) for line in result.outlines if (found := re.search(r"\((\d+) deselected\)", line)))
    assert 0 < chosen < left_out / 3


def test_few_hold_each_reason_to_refuse_once(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(
        "--trivet-strategy", "single", "--trivet-cells", "few", "-v", "-k", "refused"
    )
    assert result.parseoutcomes()["passed"] == 2, "2 processes and 4 are refused"
    result.stdout.fnmatch_lines(["| single | fp64 | cpu | left out | left out |"])


# --------------------------------------------------------------------------------------------- what others pay for it


def test_a_session_without_suites_imports_no_torch_and_prints_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
    import sys

    def test_modules():
        assert "trivet.testing.pytest_plugin" in sys.modules
        heavy = ("torch", "numpy", "cloudpickle", "trivet.testing.suites", "trivet.plugins", "trivet.registry")
        assert [name for name in heavy if name in sys.modules] == []
    """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*conformance*")


def test_without_pytest_the_suites_name_what_to_install() -> None:
    code = """
import sys
sys.modules["pytest"] = None
import trivet.testing
try:
    trivet.testing.StrategySuite
except ImportError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert ran.stdout.strip().endswith(
        "needs pytest, which is not installed. Install it with: pip install 'trivet[testing]'"
    )
