"""ZeRO stages 1 and 2 against one process: same weights, less state, no more bytes than ddp."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trivet
import zero_runs
from torch import nn
from torch.utils.checkpoint import checkpoint
from trivet import registry
from trivet.errors import ConfigurationError, TrivetError
from trivet.strategies.ddp import DDP
from trivet.strategies.elementwise import ELEMENTWISE
from trivet.strategies.slices import Bucket, buckets, rows
from trivet.strategies.zero import Zero
from trivet.testing.pool import Pools
from zero_runs import Outcome

TRAINED = {"first.weight": 15, "first.bias": 5, "second.weight": 15, "second.bias": 3, "scale": 1, "sometimes": 3}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    found.close()


def alone(net: dict[str, Any], **options: Any) -> Outcome:
    return zero_runs.fit("single", 1, net, options)


def assert_same(found: Outcome, expected: Outcome, bound: float = 1e-6) -> None:
    assert set(found.weights) == set(expected.weights)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(
            found.weights[name], weight, atol=bound, rtol=bound, msg=lambda t, n=name: f"{n}: {t}"
        )
    assert found.rates == pytest.approx(expected.rates)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)


# -------------------------------------------------------------------------------------------------- against one process


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_trains_like_one_process(stage: int, world_size: int, accumulate: int, pools: Pools) -> None:
    """Groups, a schedule built on them, clipping, ties, frozen, unused and sometimes used parameters, tiny buckets."""
    strategy = Zero(stage=stage, bucket_size_mb=60 / 2**20)
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate}
    net = {"optimizer": "SGD"}
    found = pools[world_size].run(zero_runs.fit, strategy, world_size, net, options)
    expected = alone(net, gradient_clip_val=0.5, accumulate_grad_batches=world_size * accumulate)
    assert min(expected.norms) > 0.5
    start = zero_runs.Net().state_dict()
    for one in found:
        assert_same(one, expected)
        for name in ("never", "frozen.weight", "frozen.bias", "offset"):
            assert torch.equal(one.weights[name], start[name])
        assert [one.shares[name] for name in ("never", "frozen.weight", "frozen.bias")] == [0, 0, 0]
        if accumulate == 2:
            assert any(one.held) == (stage == 1), "whole gradients between micro-batches"


def test_the_elementwise_optimizers_train_as_under_ddp(pools: Pools) -> None:
    nets = [{"optimizer": optimizer.__name__} for optimizer in ELEMENTWISE]
    options: dict[str, Any] = {"max_epochs": 3}
    ddp = DDP(find_unused_parameters=True)
    expected = pools[2].run(zero_runs.fit_each, ddp, 2, nets, options)
    found = pools[2].run(zero_runs.fit_each, "zero1", 2, nets, options)
    for net, *per_rank, reference in zip(nets, *found, expected[0], strict=True):
        for one in per_rank:
            assert_same(one, reference)
        per_element = reference.shares["first.weight"] // 15
        names = TRAINED.keys() - {"scale"}  # whose state under ddp has no dimension, and is not counted
        total = sum(reference.shares[name] for name in names)
        shares = [sum(one.shares[name] for name in names) for one in per_rank]
        assert sum(shares) == total, net
        # the parameter that is never used, and the scalar, have places in the bucket
        assert max(shares) - min(shares) <= per_element * (4 + 1 + 1), net


def test_a_parameter_frozen_or_thawed_is_laid_out_anew_with_its_state(pools: Pools) -> None:
    net = {"optimizer": "AdamW", "thaw": True}
    expected = alone(net, accumulate_grad_batches=2)
    assert not torch.equal(expected.weights["frozen.weight"], zero_runs.Net().frozen.weight)
    for strategy in ("zero1", "zero2"):
        for one in pools[2].run(zero_runs.fit, strategy, 2, net, {}):
            assert_same(one, expected)


def test_a_scalar_type_of_state_is_kept_whole_and_state_falls_with_the_ranks(pools: Pools) -> None:
    shares = {}
    for world_size in (2, 4):
        found = pools[world_size].run(zero_runs.fit, "zero2", world_size, {}, {"max_epochs": 1})
        shares[world_size] = [sum(one.shares.values()) for one in found]
    elements = sum(TRAINED.values())
    assert sum(shares[2]) == sum(shares[4]) == 2 * elements
    for world_size, held in shares.items():
        assert max(held) <= 2 * -(-(elements + 4) // world_size)  # 4: the never used one's place


# ---------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("stage", [1, 2])
def test_an_update_sends_what_ddp_sends(stage: int, pools: Pools) -> None:
    """A reduce-scatter and an all-gather of the trained elements, padded to the ranks, and a byte per parameter.

    Gloo has no reduce-scatter; an all-to-all sends as much.
    """
    options = {"accumulate_grad_batches": 3, "max_steps": 1}
    elements = sum(TRAINED.values()) + 4
    for one in pools[2].run(zero_runs.fit, Zero(stage=stage), 2, {}, options, True):
        padded = 4 * -(-elements // 2) * 2
        reductions = 1 if stage == 1 else 3
        assert one.sent["all_to_all_single"] == [padded] * reductions
        assert one.sent["all_gather"] == [padded]
        # an all-reduce is both halves
        assert (one.sent["all_to_all_single"][0] + one.sent["all_gather"][0]) / 2 <= 4 * (elements + 1)
        assert len(TRAINED) + 1 in one.sent["all_reduce"], "whether each parameter had a gradient anywhere"
        assert "reduce_scatter" not in one.sent


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}])
@pytest.mark.parametrize("stage", [1, 2])
def test_devices_whose_backend_has_a_reduce_scatter_use_it(stage: int, options: dict[str, Any], pools: Pools) -> None:
    options = {"max_epochs": 1, **options}
    exchanged = pools[2].run(zero_runs.fit, Zero(stage=stage), 2, {}, options)
    reduced = pools[2].run(zero_runs.with_a_reduce_scatter, Zero(stage=stage), 2, {}, options, True)
    for one, other in zip(reduced, exchanged, strict=True):
        assert one.sent["reduce_scatter"]
        assert "all_to_all_single" not in one.sent
        for name, value in one.weights.items():
            torch.testing.assert_close(value, other.weights[name], rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_every_strategy_goes_on_from_every_others_checkpoint(pools: Pools, tmp_path: Path) -> None:
    net: dict[str, Any] = {"optimizer": "AdamW"}
    ddp = DDP(find_unused_parameters=True)
    two = {"ddp": ddp, "zero1": Zero(1, bucket_size_mb=60 / 2**20), "zero2": "zero2"}
    once, twice = {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 1}
    paths = {"single": zero_runs.save_half("single", 1, tmp_path / "single", net, once)}
    paths["zero1 alone"] = zero_runs.save_half("zero1", 1, tmp_path / "alone", net, once)
    for name, strategy in two.items():
        paths[name] = pools[2].run(zero_runs.save_half, strategy, 2, tmp_path / name, net, twice)[0]
    expected = alone(net, accumulate_grad_batches=2)
    expected.rates = expected.rates[len(expected.rates) // 2 :]
    for one in zero_runs.go_on("single", 1, list(paths.values()), net, once):
        assert_same(one, expected)
    for one in zero_runs.go_on("zero2", 1, list(paths.values()), net, once):
        assert_same(one, expected)
    for strategy in two.values():
        for per_rank in pools[2].run(zero_runs.go_on, strategy, 2, list(paths.values()), net, twice):
            for one in per_rank:
                assert_same(one, expected)


def test_checkpoints_hold_the_users_names_and_shapes(pools: Pools, tmp_path: Path) -> None:
    from trivet.checkpoint import directory

    path = pools[2].run(zero_runs.save_half, "zero1", 2, tmp_path / "zero", {}, {})[0]
    state = directory.read(path)
    (optimizer,) = state.optimizers
    shapes = {name: tuple(values["exp_avg"].shape) for name, values in optimizer["state"].items()}
    assert shapes == {name: tuple(zero_runs.Net().get_parameter(name).shape) for name in TRAINED}
    assert set(state.module) == set(zero_runs.Net().state_dict())


# ------------------------------------------------------------------------------------------------------ skips, Runtime


class Skips(zero_runs.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 and self.global_rank == 1 else super().training_step(batch, batch_idx)


def skipping(strategy: Any, on_skip: str) -> Outcome:
    """Task: rank 1 has nothing to train on in every third update."""
    net = Skips(optimizer="SGD")
    zero_runs.trainer(strategy, 2, on_skip=on_skip).fit(net, zero_runs.loader())
    return zero_runs.outcome(net)


@pytest.mark.parametrize("on_skip", ["samples", "update"])
def test_skipped_batches_count_as_under_ddp(on_skip: str, pools: Pools) -> None:
    expected = pools[2].run(skipping, "ddp", on_skip)[0]
    for strategy in ("zero1", "zero2"):
        for one in pools[2].run(skipping, strategy, on_skip):
            assert_same(one, expected)


def by_hand(strategy: Any) -> dict[str, torch.Tensor]:
    """Task: two optimizers in a loop of one's own; the first's gradients are cleared after the second's backward."""

    def train(runtime: trivet.Runtime) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        net = nn.ModuleDict({"a": nn.Linear(3, 5), "b": nn.Linear(5, 1)})
        net.forward = lambda x: net["b"](torch.tanh(net["a"](x)))  # type: ignore[method-assign]
        first = torch.optim.AdamW(net["a"].parameters(), lr=0.1)
        second = torch.optim.SGD(net["b"].parameters(), lr=0.1, momentum=0.9)
        model, first, second = runtime.setup(net, first, second)
        x = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2))
        for batch in x:
            mine = batch.chunk(runtime.world.world_size)[runtime.world.rank]
            for optimizer in (first, second):
                first.zero_grad()
                second.zero_grad()
                runtime.backward((model(mine) ** 2).mean())
                runtime.backward(model(mine).mean())
                runtime.clip(optimizer, 0.5)
                optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    devices = 1 if strategy == "single" else 2
    return trivet.Runtime(accelerator="cpu", strategy=strategy, devices=devices).launch(train)


def test_a_loop_of_ones_own_with_two_optimizers(pools: Pools) -> None:
    expected = by_hand("single")
    for strategy in ("zero1", "zero2"):
        for weights in pools[2].run(by_hand, strategy):
            for name, weight in expected.items():
                torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------- refusals


class Sparse(zero_runs.Net):
    def __init__(self) -> None:
        super().__init__("SGD")
        self.table = nn.Embedding(4, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.table(batch[2].long()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Twice(zero_runs.Net):
    """One layer in two reentrant checkpoints: its gradient comes in two pieces."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda h: self.third(torch.tanh(self.first(h))), x, use_reentrant=True)
        return x.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.first.parameters(), self.third.weight], lr=0.01)


def refused(strategy: Any, kind: type[zero_runs.Net]) -> str:
    """Task: what the run raises on every rank."""
    with pytest.raises(TrivetError) as caught:
        zero_runs.trainer(strategy, 2).fit(kind(), zero_runs.loader())
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "kind", "message"), [("zero1", Sparse, "sparse=False"), ("zero2", Twice, "--strategy zero1")]
)
def test_gradients_that_cannot_be_cut_are_refused(strategy: str, kind: Any, message: str, pools: Pools) -> None:
    for text in pools[2].run(refused, strategy, kind):
        assert message in text


def test_gradients_in_pieces_are_fine_at_the_step(pools: Pools) -> None:
    pools[2].run(lambda: zero_runs.trainer("zero1", 2).fit(Twice(), zero_runs.loader()))


class Whole(zero_runs.Net):
    def configure_optimizers(self) -> Any:
        kinds: dict[str, Any] = {
            "Muon": lambda: torch.optim.Muon([self.first.weight]),
            "Adafactor": lambda: torch.optim.Adafactor(self.parameters()),
            "Mine": lambda: Mine(self.parameters(), lr=0.01),
        }
        return kinds[self.optimizer]()


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Mine"])
def test_optimizers_that_are_not_known_to_be_elementwise_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is not known.*Muon, Adafactor and LBFGS.*elementwise=True"):
        zero_runs.trainer("zero1", 1).fit(Whole(optimizer=name), zero_runs.loader())


def test_a_promise_is_believed() -> None:
    zero_runs.trainer(Zero(elementwise=True), 1).fit(Whole(optimizer="Mine"), zero_runs.loader())


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match="AdamW has state already"):
        Zero().wrap_optimizer(layer, optimizer)


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="stage=4"):
        registry.make("strategy", {"name": "zero", "stage": 4})
    with pytest.raises(ConfigurationError, match="stage 3 has no use"):
        registry.make("strategy", {"name": "zero", "stage": 3, "elementwise": True})
    with pytest.raises(ConfigurationError, match="bucket_size_mb=0"):
        Zero(bucket_size_mb=0)


def test_names_set_the_stage() -> None:
    made = {name: registry.make("strategy", name).plugin for name in ("zero", "zero1", "zero2", "zero3")}
    assert [made[name].stage for name in ("zero", "zero1", "zero2")] == [1, 1, 2]
    assert type(made["zero3"]).__name__ == "FSDP"
    assert made["zero3"].reshard_after_forward is True
    assert registry.make("strategy", {"name": "zero", "stage": 2}).plugin.stage == 2


def test_one_process_trains_like_single_and_says_so() -> None:
    trainer = zero_runs.trainer("zero2", 1)
    assert any("nothing is sharded" in note and "--devices 2" in note for note in trainer.plan().notes)
    found = zero_runs.fit("zero2", 1, {}, {"gradient_clip_val": 0.5})
    expected = alone({}, gradient_clip_val=0.5)
    assert all(torch.equal(found.weights[name], expected.weights[name]) for name in expected.weights)


# ------------------------------------------------------------------------------------------------------ whose memory


class Moving(trivet.Callback):
    """Gives a parameter other memory between two updates."""

    def on_update_end(self, trainer: trivet.Trainer, module: Any) -> None:
        module.third.weight.data = module.third.weight.data.clone()


def memory(callbacks: list[Any]) -> tuple[Outcome, list[bool]]:
    """Task: a fit, and whether each trained parameter has memory for itself afterwards."""
    net = zero_runs.Net("SGD")
    zero_runs.trainer("zero1", 2, callbacks=callbacks).fit(net, zero_runs.loader())
    own = [p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in net.parameters() if p.requires_grad]
    return zero_runs.outcome(net), own


def test_a_parameter_that_is_given_other_memory_is_trained_on_and_all_have_their_own_in_the_end(pools: Pools) -> None:
    (moved, own), _ = pools[2].run(memory, [Moving()])
    (plain, _), _ = pools[2].run(memory, [])
    assert all(own)
    assert_same(moved, plain, bound=0.0)


def stale() -> None:
    """Task: a backward after the step through values that the step has replaced."""
    runtime = trivet.Runtime(accelerator="cpu", strategy="zero1", devices=2)

    def train(runtime: Any) -> None:
        model = nn.Linear(3, 2, bias=False)
        model, optimizer = runtime.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 3, requires_grad=True)
        loss = model(x).sum()
        runtime.backward(model(x).sum())
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    runtime.launch(train)


def test_autograd_knows_that_the_gathered_parameters_are_others(pools: Pools) -> None:
    pools[2].run(stale)


# --------------------------------------------------------------------------------------------------------------- slices


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_slices_cover_every_element_once(world_size: int) -> None:
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(5, 3), (), (2,), (0, 4), (7, 1)]]
    held = {id(p): [] for p in params}
    for rank, bucket in itertools.product(range(world_size), buckets(params, 40, 0, world_size)):
        for param, ranges in zip(bucket.params, bucket.ranges, strict=True):
            held[id(param)].append(ranges[rank])
    for param in params:
        assert [n for a, b in held[id(param)] for n in range(a, b)] == list(range(param.numel()))


def test_a_bucket_is_padded_by_less_than_the_ranks() -> None:
    bucket = Bucket([nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(2))], 3, 4)
    assert bucket.slice_size == 5
    assert bucket.ranges == [[(0, 5), (5, 10), (10, 15), (15, 15)], [(0, 0), (0, 0), (0, 0), (0, 2)]]


@pytest.mark.parametrize("shape", [(5, 3), (2,), (1, 4), (7, 2, 2)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_are_those_of_torch_chunk(shape: tuple[int, ...], world_size: int) -> None:
    chunks = [chunk.numel() for chunk in torch.zeros(shape).chunk(world_size)]
    assert [b - a for a, b in rows(shape, world_size)] == chunks + [0] * (world_size - len(chunks))
