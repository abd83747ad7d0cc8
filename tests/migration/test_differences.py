"""What programs/differences.py gives here and gave under Lightning: rows of the table in docs/migration."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from program_runs import DIFFERENCES, EXPECTED, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = (sys.executable, "-m", "trivet.compat.lightning")
    return run(DIFFERENCES, *command, folder=tmp_path_factory.mktemp("differences"))


@pytest.fixture(scope="module")
def there() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXPECTED.read_text())["results"][DIFFERENCES]
    return found


def test_a_short_window_is_divided_by_what_it_holds(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["short_window"], there["short_window"]) == (-2.0, -1.5)


def test_max_steps_counts_updates_with_two_optimizers(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["two_optimizers"], there["two_optimizers"]) == (6, 3)


def test_shuffling_follows_from_the_seed_alone(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["shuffling"], there["shuffling"]) == (True, False)


def test_noise_in_the_step_follows_from_the_update(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["noise"], there["noise"]) == (True, False)


def test_a_resumed_run_with_noise_is_the_same(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["resumed_noise"], there["resumed_noise"]) == (True, False)


def test_an_epoch_that_is_broken_off_has_not_ended(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["broken_off_epoch"], there["broken_off_epoch"]) == (0, 1)


def test_teardown_runs_after_an_exception(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["teardown_after_an_exception"], there["teardown_after_an_exception"]) == (True, False)


def test_a_hook_that_is_none_is_an_error(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["hook_that_is_none"], there["hook_that_is_none"]) == (True, False)


def test_testing_a_checkpoint_leaves_callbacks_alone(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["callbacks_after_test"], there["callbacks_after_test"]) == (True, False)


def test_a_batch_weighs_its_samples(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["weight_of_a_batch"], there["weight_of_a_batch"]) == (3.4, 2.5)


def test_bf16_by_an_accelerator_object(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert (here["bf16_by_an_object"], there["bf16_by_an_object"]) == ("torch.bfloat16", "torch.float32")
