"""fsdp against one process: the same weights, a part of the state on each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_runs as runs
import pytest
import torch
from torch.utils.data import DataLoader
from trivet.errors import ConfigurationError, PlanError
from trivet.strategies.fsdp import FSDP
from trivet.testing.pool import Pools, TaskFailed

CLIP = {"gradient_clip_val": 0.1}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    found.close()


def assert_same(found: dict[str, Any], expected: dict[str, Any], bound: float = 1e-6) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=bound, rtol=bound, msg=lambda t, n=name: f"{n}: {t}")


def assert_trains_alike(found: list[runs.Outcome], expected: runs.Outcome) -> None:
    for one in found:
        assert_same(one.weights, expected.weights)
        assert_same(one.moments, expected.moments)
        assert one.norms == pytest.approx(expected.norms, rel=1e-6)
        assert (one.updates, one.skipped) == (expected.updates, expected.skipped)


# -------------------------------------------------------------------------------------------------- against one process


@pytest.mark.parametrize(
    ("world_size", "options", "kind"),
    [
        (2, {}, runs.Net),
        (4, {}, runs.Net),
        (2, {"reshard_after_forward": False, "prefetch": 1}, runs.Net),
        (2, {"reshard_after_forward": True, "activation_checkpointing": True}, runs.Net),
        (4, {"reshard_after_forward": 2}, runs.Net),
        (4, {"replicate": 2}, runs.Net),
        (2, {"cpu_offload": True}, runs.Net),
        (2, {"unused_parameters": False, "shard_placement": "even"}, runs.Net),
        (2, {"gather_in_compute_dtype": True}, runs.Net),
        (2, {"unit_size_mb": 0}, runs.Plain),
        (2, {"unit_classes": ["Block"]}, runs.Plain),
        (2, {}, runs.Plain),
    ],
)
def test_trains_like_one_process(world_size: int, options: dict[str, Any], kind: type[runs.Net], pools: Pools) -> None:
    """Clipped by the global norm (C10); 5x3 and 3x5, ties, a frozen part, a scalar, a buffer, an unused parameter."""
    found = pools[world_size].run(runs.fit, FSDP(**options), world_size, None, CLIP, kind)
    expected = runs.fit("single", 1, None, {**CLIP, "accumulate_grad_batches": world_size}, kind)
    assert min(expected.norms) > 0.1
    assert_trains_alike(found, expected)


def test_accumulates_without_communication(pools: Pools) -> None:
    found = pools[2].run(runs.fit, "fsdp", 2, None, {"accumulate_grad_batches": 3, **CLIP})
    assert_trains_alike(found, runs.fit("single", 1, None, {"accumulate_grad_batches": 6, **CLIP}))


@pytest.mark.slow
def test_compiled_units_train_alike(pools: Pools) -> None:
    found = pools[2].run(runs.fit_compiled, FSDP(compile_units=True), 2, timeout_s=300)
    expected = runs.fit("single", 1, None, {"accumulate_grad_batches": 2})
    for one in found:
        assert_same(one.weights, expected.weights, 1e-5)


def test_each_rank_holds_its_part(pools: Pools) -> None:
    first, second = pools[2].run(runs.fit, "fsdp", 2)
    assert [one.held["layers.0.up.weight"] for one in (first, second)] == [9, 6]
    assert first.held["scale"] == second.held["scale"] == 1
    assert not any(name.startswith("layers.1.up") for name in first.moments), "state for frozen parameters"
    assert "2 sharding units by Net.blocks(): layers.0, layers.1" in first.laid_out


def test_even_placement_cuts_the_dimension_that_divides(pools: Pools) -> None:
    found = pools[4].run(runs.fit, FSDP(replicate=2, shard_placement="even"), 4)
    assert found[0].placements == {"(Replicate(), Shard(dim=0))"}  # no dimension of 3 or 5 divides by 2 but never's


@pytest.mark.parametrize("option", [{"shard_placement": "even"}, {"shard_placement_fn": runs.other_dimension}])
def test_uneven_rows_may_be_cut_along_another_dimension(option: dict[str, Any], pools: Pools, tmp_path: Path) -> None:
    """And train alike, clip alike, and are read by one process."""
    strategy, twice = FSDP(**option), {**CLIP, "accumulate_grad_batches": 2}
    found = pools[2].run(runs.fit, strategy, 2, None, CLIP, runs.Wide, tmp_path / "saved")
    for one in found:
        assert one.cut["layers.0.middle.0.weight"] == one.cut["layers.0.up.weight"] == (0,)  # of 4 x 5, and of 5 x 3
        assert one.cut["layers.0.middle.2.weight"] == (1,)  # of 5 x 4
        assert one.held["layers.0.middle.2.weight"] == 10
    assert_trains_alike(found, runs.fit("single", 1, None, twice, runs.Wide))
    more = {**CLIP, "max_epochs": 3}
    expected = runs.fit("single", 1, None, {**twice, "max_epochs": 3}, runs.Wide)
    for one in pools[2].run(runs.fit, strategy, 2, None, more, runs.Wide, None, tmp_path / "saved"):
        assert_same(one.weights, expected.weights)
        assert_same(one.moments, expected.moments)


def test_units_are_printed_and_may_follow_from_size_or_class(pools: Pools) -> None:
    by_size = pools[2].run(runs.fit, FSDP(unit_size_mb=0), 2, None, None, runs.Plain)[0].laid_out
    assert "6 sharding units by unit_size_mb=0" in by_size
    assert by_size.endswith("part of the rest, since they share parameters with other parts: embed, head")
    by_class = pools[2].run(runs.fit, FSDP(unit_classes=["Block"]), 2, None, None, runs.Plain)[0].laid_out
    assert by_class.startswith("2 sharding units by unit_classes=['Block']: layers.0, layers.1")


# ------------------------------------------------------------------------------------------------- changes on the way


def test_unfreezing_is_noticed(pools: Pools) -> None:
    found = pools[2].run(runs.fit, "fsdp", 2, {"thaw": True})
    expected = runs.fit("single", 1, {"thaw": True}, {"accumulate_grad_batches": 2})
    assert "layers.1.up.weight" in expected.moments
    assert_trains_alike(found, expected)


def test_unfreezing_on_one_rank_is_an_error_that_names_the_parameters(pools: Pools) -> None:
    with pytest.raises(TaskFailed, match=r"layers\.1\.up\.weight"):
        pools[2].run(runs.fit, "fsdp", 2, {"thaw": True, "odd_rank": 1})


def test_a_skipped_update_is_agreed_before_backward(pools: Pools) -> None:
    found = pools[2].run(runs.fit, "fsdp", 2, {"skip": (1, 2)}, {"on_skip": "update"})
    assert [(one.updates, one.skipped) for one in found] == [(12, 2)] * 2
    assert_same(found[0].weights, found[1].weights, 0.0)
    ddp = pools[2].run(runs.fit, trivet_ddp(), 2, {"skip": (1, 2)}, {"on_skip": "update"})
    assert_same(found[0].weights, ddp[0].weights)


def test_a_step_that_is_skipped_before_its_forward_is_an_error_and_no_hang(pools: Pools) -> None:
    with pytest.raises(TaskFailed, match=r"rank 1 for batch 2 before it called layers\.0, layers\.1"):
        pools[2].run(runs.fit, "fsdp", 2, {"skip": (1, 2), "early": True}, {"on_skip": "update"})


def trivet_ddp() -> Any:
    from trivet.strategies.ddp import DDP

    return DDP(find_unused_parameters=True)


def test_skipping_samples_is_refused() -> None:
    with pytest.raises(PlanError, match="skip_samples"):
        runs.trainer("fsdp", 2, on_skip="samples")


# ------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_is_exact_where_ranks_have_different_numbers_of_batches(batch_size: int, pools: Pools) -> None:
    found = pools[2].run(runs.evaluate, 2, batch_size)
    assert [mean for mean, *_ in found] == [2.0, 2.0]
    assert sorted(found[0][1] + found[1][1]) == [0.0, 1.0, 2.0, 3.0, 4.0]
    batches = -(-5 // batch_size)
    assert found[0][2] + found[1][2] == batches, "a hook for a borrowed batch"
    assert found[0][3] == found[1][3] == -(-batches // 2)
    assert [count for *_, count in found] == [len(one[1]) for one in found], "a borrowed batch changed a buffer"


def test_validation_within_fit(pools: Pools) -> None:
    first, second = pools[2].run(runs.fit_and_validate, 2)
    assert sorted(first + second) == sorted([0, 1, 2, 3] + 2 * [0, 1, 2, 3, 4])


# ------------------------------------------------------------------------------------------------ whole parameters


def test_full_parameters_are_read_and_written_back_when_asked(pools: Pools) -> None:
    for writeback in (False, True):
        for (before, read), (_, after) in pools[2].run(runs.read_full, 2, writeback):
            assert torch.equal(before, read)
            assert torch.equal(after, torch.full_like(after, 3.0) if writeback else before)


def test_a_module_can_be_used_again_after_a_run_in_this_process(pools: Pools) -> None:
    found = pools[2].run(runs.fit_twice, FSDP(activation_checkpointing=True), 2)
    module = runs.Net()
    for number in range(2):
        runs.trainer("single", 1, max_epochs=1, accumulate_grad_batches=2).fit(module, DataLoader(runs.data(), 2))
        for one in found:
            assert_same(one[number], module.state_dict())


@pytest.mark.slow
def test_the_caller_gets_trained_weights_from_processes_that_fit_starts(capfd: pytest.CaptureFixture[str]) -> None:
    module = runs.Net()
    runs.trainer("fsdp", 2, enable_progress_bar=True).fit(module, DataLoader(runs.data(), 2))
    assert "fsdp: 2 sharding units by Net.blocks(): layers.0, layers.1" in capfd.readouterr().err
    assert_same(module.state_dict(), runs.fit("single", 1, None, {"accumulate_grad_batches": 2}).weights)


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (("fsdp", 2), ("single", 1)),
        (("single", 1), ("fsdp", 2)),
        (("fsdp", 2), ("ddp", 2)),
        (("ddp", 2), ("fsdp", 2)),
        (("fsdp", 4), ("fsdp", 2)),
    ],
)
def test_checkpoints_are_read_by_any_strategy(
    writer: tuple[str, int], reader: tuple[str, int], pools: Pools, tmp_path: Path
) -> None:
    """C17: gathered weights and moments are the same bits, and training goes on like one process."""

    def go(side: tuple[str, int], epochs: int, **paths: Path) -> runs.Outcome:
        name, world_size = side
        strategy = trivet_ddp() if name == "ddp" else name
        options = {"max_epochs": epochs, "accumulate_grad_batches": 4 // world_size}
        arguments = strategy, world_size, None, options, runs.Net, paths.get("save"), paths.get("resume")
        return runs.fit(*arguments) if world_size == 1 else pools[world_size].run(runs.fit, *arguments)[0]

    saved = go(writer, 1, save=tmp_path / "saved")
    loaded = go(reader, 1, resume=tmp_path / "saved")
    assert_same(loaded.weights, saved.weights, 0.0)
    assert_same(loaded.moments, saved.moments, 0.0)
    assert_trains_alike([go(reader, 3, resume=tmp_path / "saved")], go(("single", 1), 3))


# ----------------------------------------------------------------------------------------------------- meta device


def test_layers_are_built_on_the_meta_device_and_in_shards(pools: Pools, tmp_path: Path) -> None:
    made = pools[2].run(runs.fit_meta, FSDP(meta=True), 2, {"max_epochs": 1}, None, tmp_path / "saved")
    assert [where for where, _ in made] == [{"meta"}] * 2
    assert_same(made[0][1], made[1][1], 0.0)
    again = pools[2].run(runs.fit_meta, FSDP(meta=True), 2, {"max_epochs": 1}, tmp_path / "saved")
    assert_same(again[0][1], made[0][1], 0.0)
    assert runs.fit_meta(FSDP(meta=True), 1, {"max_epochs": 1}, tmp_path / "saved")[0] == {"meta"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_no_rank_ever_holds_a_model_that_is_built_in_shards(tmp_path: Path) -> None:
    """A model of 520 MB, in processes of their own, so that memory which others freed is not taken again."""
    strategy = FSDP(meta=True)
    for resume in (None, tmp_path / "saved"):
        pools = Pools()
        try:
            parts = pools[2].run(runs.build, strategy, 2, resume, None if resume else tmp_path / "saved")
        finally:
            pools.close()
        print(f"peak memory of a rank / model: {parts} {'loaded' if resume else 'built'}")
        assert max(parts) < 0.7


def test_parameters_that_nothing_initialises_are_named(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(TaskFailed, match=r"end\.gain\. Define reset_parameters"):
        pools[2].run(runs.fit_meta, FSDP(meta=True), 2, {"max_epochs": 1}, None, None, True)
    whole = pools[2].run(runs.fit_meta, "fsdp", 2, {"max_epochs": 1}, None, tmp_path / "saved", True)
    loaded = pools[2].run(runs.fit_meta, FSDP(meta=True), 2, {"max_epochs": 1}, tmp_path / "saved", None, True)
    assert_same(loaded[0][1], whole[0][1], 0.0)  # from a checkpoint it works


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_layer_used_past_its_unit_is_refused(pools: Pools) -> None:
    assert "outside of its unit's forward" in pools[2].run(runs.refused, runs.Past, 2)[0]


def test_an_optimizer_built_before_sharding_is_refused(pools: Pools) -> None:
    assert "Build it from self.parameters() inside" in pools[2].run(runs.refused, runs.Early, 2)[0]


def test_units_that_cannot_be_are_refused(pools: Pools) -> None:
    found = pools[2].run(runs.refused, runs.Plain, 2, FSDP(unit_classes=["Blok"]))[0]
    assert "unit_classes names ['Blok'], and the module holds only Block, Linear, ModuleList." in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_placement": "columns"}, "allowed are rows, even"),
        ({"replicate": 0}, "replicate=0 must be at least 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FSDP(**options)


@pytest.mark.parametrize("options", [{"replicate": 3}, {"reshard_after_forward": 3}])
def test_meshes_that_do_not_divide_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"fsdp: "):
        runs.trainer(FSDP(**options), 4)


# ----------------------------------------------------------------------------------------------------- one process


def test_one_process_trains_like_single_and_says_so() -> None:
    plan = runs.trainer("fsdp", "auto", precision="bf16").plan()
    assert any("nothing is sharded" in note and "--devices" in note for note in plan.notes)
    assert_trains_alike([runs.fit("fsdp", 1, None, CLIP)], runs.fit("single", 1, None, CLIP))


def test_the_command_line_of_the_issue(tmp_path: Path) -> None:
    command = ["fit", "--strategy", "fsdp", "--precision", "bf16", "--model", "fsdp_cli.Net", "--data", "fsdp_cli.Data"]
    done = subprocess.run(
        [sys.executable, "-m", "trivet", *command], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing is sharded" in done.stderr
    assert "--devices 2" in done.stderr


def test_the_core_loads_no_dtensor() -> None:
    """torch does, when an optimizer steps; Trivet must not."""
    code = (
        "import sys, trivet.trainer, trivet.runtime, trivet.strategies.single; "
        "print('torch.distributed.tensor' in sys.modules, 'torch.distributed.fsdp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --------------------------------------------------------------------------------------------------------- runtime


def test_runtime_drives_a_loop_of_ones_own(pools: Pools) -> None:
    expected = runs.in_runtime("single", 1)
    for weights in pools[2].run(runs.in_runtime, "fsdp", 2):
        assert_same(weights, expected)
