"""Compressed gradients, local SGD and DiLoCo on two ranks: what they compute, what a checkpoint holds of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import communication_runs as runs
import pytest
import torch
from ranks import on_two_ranks
from trivet import registry
from trivet.checkpoint import directory
from trivet.errors import ConfigurationError, PlanError

POWERSGD = {"name": "ddp", "communication_hook": "powersgd"}
LOCAL = {"name": "local-sgd", "period": 4}
DILOCO = {"name": "diloco", "period": 4}


SGD = {"optimizer": "SGD"}


def same_weights(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Not the buffers, which ranks have their own of until the next forward."""
    return all(torch.equal(a[: runs.PARAMETERS], b[: runs.PARAMETERS]) for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------------------------------------------------ powersgd


def test_powersgd_of_full_rank_is_the_average() -> None:
    """The gradient of a matrix is a sum of one product for each of four samples."""
    plain = on_two_ranks(runs.course, "ddp", SGD)[0]
    found = on_two_ranks(runs.course, {**POWERSGD, "powersgd_rank": 4}, SGD)
    assert same_weights(*found)
    torch.testing.assert_close(found[0][-1], plain[-1], atol=1e-4, rtol=1e-4)


def test_powersgd_starts_when_told_and_trains() -> None:
    plain = on_two_ranks(runs.course, "ddp", SGD)[0]
    found = on_two_ranks(runs.course, {**POWERSGD, "powersgd_start": 3}, SGD)[0]
    torch.testing.assert_close(found[2], plain[2])
    assert not torch.allclose(found[4], plain[4], atol=1e-5)
    torch.testing.assert_close(found[-1], plain[-1], atol=0.2, rtol=0.2)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_compresses_where_steps_are_the_users(hook: str) -> None:
    net = {"manual": True, **SGD}
    plain = on_two_ranks(runs.course, "ddp", net)[0]
    found = on_two_ranks(runs.course, {"name": "ddp", "communication_hook": hook, "powersgd_rank": 4}, net)
    assert same_weights(*found)
    assert not torch.equal(found[0][-1], plain[-1])
    torch.testing.assert_close(found[0][-1], plain[-1], atol=2e-2, rtol=2e-2)


def test_powersgd_takes_no_loss_scale() -> None:
    with pytest.raises(PlanError, match="loss_scaling"):
        runs.trainer(POWERSGD, precision="fp16-mixed").fit(runs.Net(), runs.loader())


# -------------------------------------------------------------------------------------------------------- ranks apart


def test_averages_every_period_and_at_the_end() -> None:
    found = on_two_ranks(runs.course, LOCAL, SGD)
    alike = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
    assert alike == [at in (4, 8) for at in range(1, 11)] + [True]
    mean = (found[0][9] + found[1][9]) / 2
    torch.testing.assert_close(found[0][-1], mean, atol=1e-6, rtol=1e-6)


def test_the_outer_step_is_nesterovs() -> None:
    """With rate 1 and no momentum local SGD; else as by hand, from the same first average."""
    local = on_two_ranks(runs.course, LOCAL, SGD)[0]
    plain = on_two_ranks(runs.course, {**DILOCO, "outer_lr": 1.0, "outer_momentum": 0.0}, SGD)[0]
    torch.testing.assert_close(plain[-1], local[-1], atol=1e-5, rtol=1e-5)
    found, n = on_two_ranks(runs.course, DILOCO, SGD)[0], runs.PARAMETERS
    start, mean = runs.vector(runs.Net()), local[3]
    expected = torch.cat([start[:n] + 0.7 * (1 + 0.9) * (mean[:n] - start[:n]), mean[n:]])
    torch.testing.assert_close(found[3], expected, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with checkpoints of three strategies, written between two averages, and what became of them by rank."""
    folder = tmp_path_factory.mktemp("written")
    runs_of = {s["name"]: on_two_ranks(runs.resumed, s, folder / s["name"], 6) for s in (POWERSGD, LOCAL, DILOCO)}
    return folder, runs_of


@pytest.mark.parametrize("name", ["ddp", "local-sgd", "diloco"])
def test_goes_on_to_the_bit(name: str, written: tuple[Path, dict[str, Any]]) -> None:
    for rank, (whole, parts) in enumerate(written[1][name]):
        assert len(whole) == len(parts) == 5
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True)), f"rank {rank}"


def test_what_a_checkpoint_holds(written: tuple[Path, dict[str, Any]]) -> None:
    folder = written[0]
    kinds = {
        name: sorted({"/".join(key.split("/")[:2]) for key in directory.read(folder / name).strategy})
        for name in ("ddp", "local-sgd", "diloco")
    }
    both = ["rank0/optimizers", "rank0/tensors", "rank1/optimizers", "rank1/tensors"]
    assert kinds == {
        "ddp": ["all/powersgd", "rank0/powersgd", "rank1/powersgd"],
        "local-sgd": ["all/met", "all/updates", *both],
        "diloco": ["all/anchor", "all/met", "all/momentum", "all/updates", *both],
    }
    mine = directory.read(folder / "diloco", rank=1).strategy
    assert not any(name.startswith("rank0/") for name in mine)
    assert any(name.startswith("rank1/") for name in mine)


@pytest.mark.parametrize(
    ("name", "strategy", "devices", "words"),
    [
        ("ddp", POWERSGD, 1, "cannot read"),
        ("ddp", "ddp", 2, "cannot read"),
        ("local-sgd", LOCAL, 1, "of 2 ranks, and there are 1"),
        ("diloco", "ddp", 2, "cannot read"),
        ("diloco", LOCAL, 2, "cannot read"),
        ("local-sgd", DILOCO, 2, ""),
    ],
)
def test_others_read_what_they_can(
    name: str, strategy: Any, devices: int, words: str, written: tuple[Path, dict[str, Any]]
) -> None:
    path = written[0] / name
    if devices == 1:
        course, told = runs.from_checkpoint(strategy, path, 1)
    else:
        course, told = on_two_ranks(runs.from_checkpoint, strategy, path)[0]
    assert len(course) > 1
    assert [words in text for text in told if "checkpoint" in text] == ([True] if words else [])


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"name": "local-sgd", "period": 0}, "local-sgd: period=0 must be at least 1"),
        ({"name": "diloco", "outer_lr": 0.0}, "diloco: outer_lr=0.0 must be positive"),
        ({"name": "diloco", "outer_momentum": 1.0}, "diloco: outer_momentum=1.0 must be at least 0 and below 1"),
        ({"name": "ddp", "powersgd_rank": 0}, "powersgd_rank=0 must be at least 1"),
    ],
)
def test_wrong_options_are_refused(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        registry.make("strategy", strategy)


def test_an_average_of_weights_is_refused_where_ranks_differ() -> None:
    with pytest.raises(ConfigurationError, match="ranks hold different weights"):
        on_two_ranks(averaged)


def averaged() -> None:
    from trivet.callbacks import WeightAveraging

    runs.trainer(LOCAL, callbacks=[WeightAveraging()]).fit(runs.Net(), runs.loader())
