"""DeepSpeed's own engine against one process: same weights, norms and rates; what it cannot do is refused.

In an environment of its own, see `.ci/run`; stages 1 and 3, and all four where TRIVET_CI_FULL=1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import clipped
import deepspeed_runs
import dtypes
import pytest
import torch
import trivet
from deepspeed_runs import Net, Outcome
from full import FULL
from trivet.callbacks.callback import Callback
from trivet.checkpoint import directory
from trivet.checkpoint.convert import convert
from trivet.checkpoint.sums import read_sum
from trivet.errors import CheckpointError, ConfigurationError, PlanError, PluginBroken, TrivetError
from trivet.precision.mixed import BF16Mixed
from trivet.testing.pool import Pools, TaskFailed

pytestmark = pytest.mark.deepspeed
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install 'trivet[deepspeed]'"
)
STAGES = [0, 1, 2, 3] if FULL else [1, 3]
CLIPPED = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    found.close()


def deepspeed(stage: int | None = None, **options: Any) -> Any:
    from trivet.strategies.deepspeed import DeepSpeed

    return DeepSpeed(stage, **options)


def fit(world_size: int, pools: Pools, *args: Any, **options: Any) -> list[Outcome]:
    strategy, *rest = args
    if world_size == 1:
        return [deepspeed_runs.fit(strategy, 1, *rest, **options)]
    return pools[world_size].run(deepspeed_runs.fit, strategy, world_size, *rest, timeout_s=120.0)


def assert_same(found: Outcome, expected: Outcome, bound: float = 1e-6) -> None:
    assert set(found.weights) == set(expected.weights)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], weight, atol=bound, rtol=bound, msg=lambda t, n=name: f"{n}: {t}"
        )
    assert found.rates == pytest.approx(expected.rates)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)


# -------------------------------------------------------------------------------------------------- against one process


@needs_deepspeed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_trains_like_one_process(stage: int, world_size: int, pools: Pools) -> None:
    """Two groups, a schedule built on them, momentum, weight decay, clipping, a frozen layer, a short last window."""
    found = fit(world_size, pools, deepspeed(stage), {}, CLIPPED)
    expected = deepspeed_runs.fit("single", 1, {}, {**CLIPPED, "accumulate_grad_batches": 2 * world_size})
    assert min(expected.norms) > 0.5
    start = Net().state_dict()
    for one in found:
        assert_same(one, expected)
        assert torch.equal(one.weights["frozen.weight"], start["frozen.weight"])


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_a_short_window_weighs_what_it_holds(stage: int, pools: Pools) -> None:
    """13 micro-batches in windows of three; without clipping a wrong scale of the gradient is seen."""
    options = {"accumulate_grad_batches": 3}
    assert_same(fit(1, pools, deepspeed(stage), {}, options)[0], deepspeed_runs.fit("single", 1, {}, options))


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_adamw(stage: int, pools: Pools) -> None:
    net = {"optimizer": "AdamW"}
    expected = deepspeed_runs.fit("single", 1, net, {"accumulate_grad_batches": 2})
    for one in fit(2, pools, deepspeed(stage), net, {}):
        assert_same(one, expected, 1e-5)


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offloads_the_optimizer(stage: int, pools: Pools) -> None:
    expected = deepspeed_runs.fit("single", 1, {}, CLIPPED)
    assert_same(fit(1, pools, deepspeed(stage, offload_optimizer=True), {}, CLIPPED)[0], expected)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_mixed_keeps_parameters_in_float32(stage: int, pools: Pools) -> None:
    options = {"precision": "bf16-mixed"}
    assert_same(fit(1, pools, deepspeed(stage), {}, options)[0], deepspeed_runs.fit("single", 1, {}, options), 1e-5)


@needs_deepspeed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_true(stage: int, world_size: int, pools: Pools) -> None:
    """DeepSpeed steps a float32 copy, which is nearer to float32 than plain bfloat16: first losses are compared."""
    found = fit(world_size, pools, deepspeed(stage), {}, {"precision": "bf16-true"})
    expected = deepspeed_runs.fit("single", 1, {}, {"accumulate_grad_batches": world_size})
    for rank, one in enumerate(found):
        assert one.weights["first.weight"].dtype == torch.bfloat16
        assert one.losses[:3] == pytest.approx(expected.losses[rank::world_size][:3], rel=0.05)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(one.weights[name].float(), weight, atol=0.05, rtol=0.05)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_everything_has_the_dtype_that_the_plan_states(stage: int, pools: Pools) -> None:
    """C08: parameters, buffers, compute, outputs, what is communicated, and optimizer state."""
    precisions = ["fp32", "bf16-mixed", "bf16-true"]  # the others are refused
    for rank in pools[2].run(dtypes.train_each, deepspeed(stage), 2, precisions, timeout_s=120.0):
        for precision, seen in zip(precisions, rank, strict=True):
            dtypes.assert_as_planned(seen, f"stage {stage} with {precision}")
            assert seen.communicated


class Forgetful(BF16Mixed):
    """Says bfloat16 and computes in float32."""

    def forward_context(self, device_type: str) -> Any:
        return torch.autocast(device_type, enabled=False)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_that_is_not_kept_is_an_error(stage: int, pools: Pools) -> None:
    """C08."""
    with pytest.raises(TaskFailed, match=r"matrix products gave \['float32'\], planned bfloat16"):
        pools[2].run(dtypes.train, deepspeed(stage), 2, Forgetful())


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_clip_as_one_process(stage: int, pools: Pools) -> None:
    """C10: by the norm of the whole model, which is also what is reported."""
    expected, norms = clipped.train("single", 1)
    assert min(norms) > clipped.CLIP
    for weights, found in pools[2].run(clipped.train, deepspeed(stage), 2, timeout_s=120.0):
        assert found == pytest.approx(norms, rel=1e-6)
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-6)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_and_the_modules_own_backward_are_called(stage: int, pools: Pools) -> None:
    found = fit(1, pools, deepspeed(stage), {"hooks": True}, CLIPPED)[0]
    expected = deepspeed_runs.fit("single", 1, {"hooks": True}, CLIPPED)
    assert found.calls == expected.calls
    assert_same(found, expected)


@needs_deepspeed
@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_at_stage_3_gathers_parameters(world_size: int, pools: Pools) -> None:
    tasks = (deepspeed(3), world_size, {}, {})
    found = (
        [deepspeed_runs.fit(*tasks, validates=True)]
        if world_size == 1
        else pools[2].run(deepspeed_runs.fit_and_validate, *tasks)
    )
    expected = deepspeed_runs.fit("single", 1, {}, {"accumulate_grad_batches": world_size}, validates=True)
    for one in found:
        assert one.metrics["val/loss"] == pytest.approx(expected.metrics["val/loss"], rel=1e-5)


@needs_deepspeed
@pytest.mark.parametrize("stage", STAGES)
def test_runtime(stage: int) -> None:
    assert deepspeed_runs.by_hand(deepspeed(stage)) == pytest.approx(deepspeed_runs.by_hand("single"), rel=1e-6)


@needs_deepspeed
def test_a_launched_fit_returns_the_weights() -> None:
    module = Net()
    deepspeed_runs.trainer(deepspeed(3), 2).fit(module, deepspeed_runs.loader())
    expected = deepspeed_runs.fit("single", 1, {}, {"accumulate_grad_batches": 2})
    for name, weight in expected.weights.items():
        torch.testing.assert_close(module.state_dict()[name], weight, atol=1e-6, rtol=1e-6)


@needs_deepspeed
def test_nothing_is_left_in_the_process() -> None:
    before = dict(os.environ)
    module = Net()
    for _ in range(2):
        deepspeed_runs.trainer(deepspeed(3), 1, max_epochs=1).fit(module, deepspeed_runs.loader())
    assert not torch.distributed.is_initialized()
    assert "LOCAL_RANK" not in set(os.environ) - set(before)
    assert all(param.shape == other.shape for param, other in zip(module.parameters(), Net().parameters(), strict=True))
    assert module.first(torch.ones(3)).shape == (5,)


@needs_deepspeed
def test_nothing_is_left_where_the_engine_cannot_be_built() -> None:
    strategy = deepspeed(config={"zero_optimization": {"reduce_bucket_size": "many"}})
    with pytest.raises(ValueError, match="reduce_bucket_size"):
        deepspeed_runs.fit(strategy, 1, {}, {})
    assert not torch.distributed.is_initialized()


# ---------------------------------------------------------------------------------------------------------- checkpoints


@needs_deepspeed
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_resumes_exactly(stage: int, world_size: int, pools: Pools, tmp_path: Path) -> None:
    args = (deepspeed(stage), world_size, tmp_path, {"optimizer": "AdamW"}, {})
    found = (
        [deepspeed_runs.save_and_resume(*args)]
        if world_size == 1
        else pools[2].run(deepspeed_runs.save_and_resume, *args, timeout_s=120.0)
    )
    for whole, resumed, saved in found:
        half = len(resumed.rates)
        assert resumed.rates == whole.rates[half:]
        assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
        assert (Path(saved) / "deepspeed").is_dir() == (stage > 0)
    whole, _, saved = found[0]
    assert set(directory.read_weights(saved)) == set(Net().state_dict())
    if stage > 0:
        convert(Path(saved), tmp_path / "converted")
        options = {"accumulate_grad_batches": world_size}
        elsewhere = deepspeed_runs.fit("single", 1, {"optimizer": "AdamW"}, options, resume=str(tmp_path / "converted"))
        assert_same(replace(elsewhere, rates=whole.rates), whole)


@needs_deepspeed
def test_resumes_bf16_exactly(tmp_path: Path) -> None:
    options = {"precision": "bf16-true"}
    whole, resumed, saved = deepspeed_runs.save_and_resume(deepspeed(1), 1, tmp_path, {}, options)
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())
    convert(Path(saved), tmp_path / "converted")
    found, before = directory.read(tmp_path / "converted"), directory.read_weights(saved)
    assert all(torch.equal(found.module[name].to(weight.dtype), weight) for name, weight in before.items())
    assert found.module["first.weight"].dtype == torch.float32


@needs_deepspeed
def test_it_is_given_no_file_that_makes_other_objects(tmp_path: Path) -> None:
    saved = deepspeed_runs.fit(deepspeed(1), 1, {}, {"max_epochs": 1}, save=tmp_path)
    (file,) = Path(saved.saved).glob("deepspeed/state/*optim_states.pt")
    torch.save({**torch.load(file, weights_only=False), "more": Path("a")}, file)
    values = json.loads((Path(saved.saved) / "manifest.json").read_text())
    values["files"][file.relative_to(saved.saved).as_posix()] = dict(read_sum(file))
    (Path(saved.saved) / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"would make objects of pathlib\.PosixPath, which are"):
        deepspeed_runs.fit(deepspeed(1), 1, {}, {}, resume=saved.saved)
    with pytest.raises(CheckpointError, match=r"optim_states\.pt cannot be loaded"):
        convert(Path(saved.saved), tmp_path / "converted")


@needs_deepspeed
def test_another_strategy_reads_the_weights_and_is_told_of_the_rest(tmp_path: Path) -> None:
    saved = deepspeed_runs.fit(deepspeed(3), 1, {}, {"max_epochs": 1}, save=tmp_path)
    expected = deepspeed_runs.fit("single", 1, {}, {"max_epochs": 1}, validates=True)
    assert deepspeed_runs.validate("single", 1, saved.saved)["val/loss"] == pytest.approx(expected.metrics["val/loss"])
    assert deepspeed_runs.validate(deepspeed(3), 1, saved.saved)["val/loss"] == pytest.approx(
        expected.metrics["val/loss"]
    )
    with pytest.raises(CheckpointError, match="its own folder 'deepspeed', which no other strategy reads"):
        deepspeed_runs.fit("single", 1, {}, {}, resume=saved.saved)
    with pytest.raises(CheckpointError, match=r"written by DeepSpeed with .*'stage': 3.*this run has .*'stage': 2"):
        deepspeed_runs.fit(deepspeed(2), 1, {}, {}, resume=saved.saved)


@needs_deepspeed
def test_it_does_not_resume_from_another_strategys_checkpoint(tmp_path: Path) -> None:
    saved = deepspeed_runs.fit("single", 1, {}, {"max_epochs": 1}, save=tmp_path)
    with pytest.raises(CheckpointError, match="its own folder 'deepspeed', which this checkpoint of strategy 'single'"):
        deepspeed_runs.fit(deepspeed(2), 1, {}, {}, resume=saved.saved)


@needs_deepspeed
@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_full_parameters(precision: str) -> None:
    """Whole at stage 3; what rank 0 writes is trained from, also where DeepSpeed steps a copy."""

    class Reader(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            with trainer.full_parameters(writeback=True):
                assert module.first.weight.shape == (5, 3)
                with torch.no_grad():
                    module.first.weight.fill_(2.0)

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            with trainer.full_parameters():
                self.seen = module.first.weight.detach().clone()

    reader = Reader()
    options = {"callbacks": [reader], "max_epochs": 1, "precision": precision}
    for stage in (2, 3):
        deepspeed_runs.fit(deepspeed(stage), 1, {}, options)
        assert bool((reader.seen == 2.0).all())


# ------------------------------------------------------------------------------------------------------------- refusals


def test_an_uninstalled_deepspeed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(PluginBroken, match=r"pip install 'trivet\[deepspeed\]'"):
        trivet.Trainer(strategy="deepspeed", accelerator="cpu", max_epochs=1)


@needs_deepspeed
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"precision": "fp16-true"}, "DeepSpeed has no float16 on the CPU"),
        ({"precision": "fp16-mixed"}, "DeepSpeed has no float16 on the CPU"),
        ({"precision": "fp64"}, "DeepSpeed has no engine for parameters in float64"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips by the global norm only"),
        ({"on_skip": "update"}, "which a rank cannot leave out"),
    ],
)
def test_refused_before_launch(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason) as refused:
        deepspeed_runs.trainer(deepspeed(2), 2, **options)
    assert all(conflict.remedy for conflict in refused.value.conflicts)


@needs_deepspeed
def test_manual_optimization_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'manual_optimization', which the second does not offer.*Use instead"):
        deepspeed_runs.trainer(deepspeed(2), 1).fit(deepspeed_runs.Manual(), deepspeed_runs.loader())


@needs_deepspeed
def test_what_a_module_cannot_do_is_refused(pools: Pools) -> None:
    with pytest.raises(TrivetError, match="training_step returned None for batch 2"):
        deepspeed_runs.fit(deepspeed(1), 1, {"none_at": 2}, {})
    with pytest.raises(ConfigurationError, match=r"frozen.weight, frozen.bias was frozen or unfrozen"):
        deepspeed_runs.fit(deepspeed(1), 1, {"thaw": True}, {})

    class Scalar(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(1.0))

    with pytest.raises(ConfigurationError, match="temperature has no dimension"):
        deepspeed_runs.trainer(deepspeed(1), 1).fit(Scalar(), deepspeed_runs.loader())

    class NoOptimizer(Net):
        def configure_optimizers(self) -> None:
            return None

    with (
        pytest.warns(UserWarning, match="returned no optimizer"),  # before the engine is asked
        pytest.raises(ConfigurationError, match="returned no optimizer"),
    ):
        deepspeed_runs.trainer(deepspeed(1), 1).fit(NoOptimizer(), deepspeed_runs.loader())


@needs_deepspeed
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stage": 4}, "has the stages 0, 1, 2 and 3"),
        ({"stage": 0, "offload_optimizer": True}, "needs stage 1, 2 or 3"),
        ({"config": "nowhere.json"}, "'nowhere.json' cannot be read"),
        ({"config": {"optimizer": {"type": "Adam"}}}, "section 'optimizer', but the module's configure_optimizers"),
        (
            {"stage": 1, "config": {"zero_optimization": {"stage": 3}}},
            r"zero_optimization.stage = 3, but --strategy.stage 1 makes it 1",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        deepspeed(**options)


# ----------------------------------------------------------------------------------------------------- DeepSpeed's file


def written(tmp_path: Path, **content: Any) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return str(path)


@needs_deepspeed
@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (
            {"gradient_accumulation_steps": 4},
            {"accumulate_grad_batches": 2},
            "gradient_accumulation_steps = 4, but --accumulate_grad_batches 2 makes it 2",
        ),
        ({"gradient_clipping": 1.0}, {}, "gradient_clipping = 1.0, but --gradient_clip_val null makes it 0.0"),
        (
            {"bf16": {"enabled": True}},
            {"precision": "fp32"},
            "bf16.enabled = True, but --precision with parameters in fp32 makes it False",
        ),
        (
            {"communication_data_type": "fp16"},
            {"precision": "bf16-true"},
            "communication_data_type = 'fp16', but --precision, which reduces in bf16 makes it 'bf16'",
        ),
    ],
)
def test_a_contradiction_names_both_values_and_both_sources(
    content: dict[str, Any], options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = written(tmp_path, **content)
    with pytest.raises(PlanError) as refused:
        deepspeed_runs.trainer({"name": "deepspeed", "config": path}, 1, **options)
    assert f"config={path!r} says {sentence}" in str(refused.value)


@needs_deepspeed
def test_the_file_decides_what_flags_do_not(tmp_path: Path, pools: Pools) -> None:
    path = written(
        tmp_path,
        train_batch_size="auto",
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps="auto",
        gradient_clipping=0.5,
        zero_optimization={"stage": 3, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu"}},
    )
    strategy = deepspeed(config=path)
    assert (strategy.stage, strategy.offload_optimizer) == (3, True)
    assert_same(fit(1, pools, strategy, {}, CLIPPED)[0], deepspeed_runs.fit("single", 1, {}, CLIPPED))


@needs_deepspeed
def test_another_batch_size_than_the_loaders_is_an_error(tmp_path: Path) -> None:
    strategy = deepspeed(config=written(tmp_path, train_batch_size=32))
    with pytest.raises(
        ConfigurationError, match="train_batch_size = 32, but the loader's micro-batches have 2 samples"
    ):
        deepspeed_runs.fit(strategy, 1, {}, {})


@needs_deepspeed
def test_accumulation_that_follows_from_the_global_batch_is_compared_too(tmp_path: Path) -> None:
    strategy = deepspeed(config=written(tmp_path, gradient_accumulation_steps=4))
    with pytest.raises(ConfigurationError, match="= 4, but --accumulate_grad_batches 3 makes it 3"):
        deepspeed_runs.fit(strategy, 1, {}, {"global_batch_size": 6})


@needs_deepspeed
def test_a_rank_that_fails_ends_all(pools: Pools) -> None:
    with pytest.raises(TaskFailed, match="training_step returned None"):
        pools[2].run(deepspeed_runs.fit, deepspeed(2), 2, {"none_at": 3}, {})
