"""What holds under every strategy that has several processes: each is held against one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import dtypes
import pytest
import torch
import trivet
import zero_runs
from ranks import outcomes, run
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from trivet.errors import ConfigurationError
from trivet.layout import sharded, whole
from trivet.strategies.elementwise import ELEMENTWISE
from trivet.strategies.fsdp import FSDP

STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-6) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=bound, rtol=bound, msg=lambda t, n=name: f"{n}: {t}")


def data(samples: int, width: int, outputs: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(samples, width, generator=generator), torch.randn(samples, outputs, generator=generator)
    )


# ------------------------------------------------------------------------------------------------------ frozen weights

WIDTH, OUT = 192, 32


class Adapted(trivet.Module):
    """Large frozen layers with small ones beside them: 0.6 % of the parameters are trained, as with LoRA."""

    def __init__(self, everything: bool = False) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH).requires_grad_(everything) for _ in range(2)])
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, OUT, bias=False)
        self.reductions = dtypes.Reductions()
        self.held: set[str] = set()
        self.state: dict[str, int] = {}

    def blocks(self) -> list[nn.Module]:
        return list(self.body)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.body:
            x = torch.tanh(layer(x))
        return mse_loss(self.up(self.down(x)) + x[:, :OUT], y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.held = {name for name, param in self.named_parameters() if param.grad is not None}

    def on_update_end(self) -> None:
        states = self.trainer.optimizers[0].state
        self.state = {name: len(states[p]) for name, p in self.named_parameters() if states.get(p)}
        if self.trainer.progress.update == 1:
            self.reductions.sizes.clear()  # the first also compares and sets up


def adapt(strategy: str, everything: bool) -> tuple[int, set[str], set[str]]:
    """Task: elements reduced in one update, and the parameters that have a gradient or optimizer state."""
    torch.manual_seed(0)
    net = Adapted(everything)
    with net.reductions:
        trivet.Trainer(strategy=strategy, devices=2, max_steps=2, **QUIET).fit(net, DataLoader(data(8, WIDTH, OUT), 2))
    return sum(net.reductions.sizes), net.held, set(net.state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_weights_have_no_gradient_no_state_and_are_not_reduced(strategy: str) -> None:
    trained = {"down.weight", "up.weight"}
    elements = sum(p.numel() for name, p in Adapted().named_parameters() if name in trained)
    total = sum(p.numel() for p in Adapted().parameters())
    assert elements / total == pytest.approx(0.006, rel=0.05)
    for reduced, held, state in run(2, adapt, strategy, False):
        assert held == state == trained
        assert elements <= reduced <= elements + 2, "at most the padding"
    for reduced, *_ in run(2, adapt, strategy, True):
        assert reduced >= total
        assert elements <= 0.01 * reduced


# -------------------------------------------------------------------------------------------------------- accumulation


def accumulate(strategy: str, batches: int) -> tuple[list[int], tuple[str, ...]]:
    """Task: the elements of each reduction of one update, and the Plan's notes."""
    net = Adapted()
    trainer = trivet.Trainer(strategy=strategy, devices=2, max_steps=2, accumulate_grad_batches=batches, **QUIET)
    with net.reductions:
        trainer.fit(net, DataLoader(data(8 * batches, WIDTH, OUT), 2))
    return net.reductions.sizes, trainer.plan().notes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inner_micro_batches_do_not_communicate_or_the_plan_says_so(strategy: str) -> None:
    ((once, _), _), ((thrice, notes), _) = run(2, accumulate, strategy, 1), run(2, accumulate, strategy, 3)
    said = any("reduced in every micro-batch, also when accumulating" in note for note in notes)
    assert said == (strategy == "zero2")
    assert thrice == once * (3 if said else 1)


# ----------------------------------------------------------------------------------------------------- full parameters


class Average(trivet.Callback):
    """An exponential moving average of whole parameters, as somebody would write it; at the end it is trained from."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_update_end(self, trainer: trivet.Trainer, module: trivet.Module) -> None:
        with trainer.full_parameters():
            for name, param in module.named_parameters():
                assert sharded(param) is None
                value = param.detach().clone()
                self.mean[name] = value if name not in self.mean else self.mean[name].lerp(value, 0.1)

    def on_train_epoch_end(self, trainer: trivet.Trainer, module: trivet.Module) -> None:
        with trainer.full_parameters(writeback=True), torch.no_grad():
            for name, param in module.named_parameters():
                param.copy_(self.mean[name] + trainer.global_rank)  # rank 0's is what counts


class Uneven(trivet.Module):
    """Validates on batches that do not divide among the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def average(strategy: str, devices: int) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Task: the average, the weights in the end, and the loss in validation."""
    net, reader = Uneven(), Average()
    trainer = trivet.Trainer(strategy=strategy, devices=devices, max_epochs=2, callbacks=[reader], **QUIET)
    trainer.fit(net, DataLoader(data(16, 3, 3), 4 // devices), DataLoader(data(7, 3, 3), 2))
    return reader.mean, dict(net.state_dict()), trainer.callback_metrics["val/loss"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_average_reads_whole_parameters_and_is_written_back(strategy: str) -> None:
    """And validation is exact, with four batches for one process or two, the last of one sample."""
    mean, weights, loss = average("single", 1)
    for found in run(2, average, strategy, 2):
        assert_same(found[0], mean)
        assert_same(found[1], weights)
        assert found[2] == pytest.approx(loss, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------- optimizers


class Grouped(Uneven):
    """With one of torch's optimizers, two groups and a scalar."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.scale = name, nn.Parameter(torch.tensor(0.7))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return zero_runs.make(self.name, [{"params": params[:2], "lr": 0.03}, {"params": params[2:]}])


class Matrices(Uneven):
    """Without biases, for an optimizer that wants matrices."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False))

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.name)(self.parameters(), lr=0.01)


def optimize(strategy: Any, kind: type[trivet.Module], names: list[str]) -> list[dict[str, Tensor]]:
    """Task: the weights after twelve updates with each optimizer."""
    found = []
    for name in names:
        torch.manual_seed(4)
        net = kind(name)
        trainer = trivet.Trainer(strategy=strategy, devices=2, max_epochs=3, **QUIET)
        trainer.fit(net, DataLoader(data(16, 3, 3), 2))
        found.append(dict(net.state_dict()))
    return found


@pytest.mark.parametrize("strategy", ["zero2", "zero3", FSDP(cpu_offload=True)], ids=["zero2", "zero3", "offloaded"])
def test_the_elementwise_optimizers_train_as_under_ddp(strategy: Any) -> None:
    """`test_zero` has them under zero1, in a harder case."""
    names = [optimizer.__name__ for optimizer in ELEMENTWISE]
    expected = run(2, optimize, "ddp", Grouped, names)[0]
    for rank in run(2, optimize, strategy, Grouped, names):
        for name, weights, reference in zip(names, rank, expected, strict=True):
            named = ({f"{name}: {key}": value for key, value in side.items()} for side in (weights, reference))
            assert_same(*named)


def test_an_optimizer_that_looks_at_whole_matrices_may_train_under_fsdp() -> None:
    """Muon's arithmetic is in bfloat16, so that it is near and not the same."""
    (expected,), _ = run(2, optimize, "ddp", Matrices, ["Muon"])
    for (weights,) in run(2, optimize, "fsdp", Matrices, ["Muon"]):
        assert_same(weights, expected, 3e-3)


def test_what_dtensor_cannot_do_is_refused_by_name() -> None:
    found = outcomes(optimize, "fsdp", Matrices, ["Adafactor"])
    text = " ".join(map(str, found))
    assert "Adafactor does with sharded parameters what torch's DTensor cannot do" in text
    assert "--strategy ddp" in text


# ------------------------------------------------------------------------------------------------------------- Runtime


def loop(runtime: trivet.Runtime, folder: Path, algorithm: str, resumes: bool) -> dict[str, Tensor]:
    """Two micro-batches an update, clipped; saved after two updates, or begun there."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    model, optimizer = runtime.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    done = runtime.load(folder)["updates"] if resumes else 0
    loader = DataLoader(data(32, 3, 3), 4 // runtime.world.world_size)
    for index, (x, y) in enumerate(runtime.setup_dataloader(loader)):
        if index < 2 * done:
            continue
        if index % 2 == 0:
            with runtime.no_sync():
                runtime.backward(mse_loss(model(x), y) / 2)
            continue
        runtime.backward(mse_loss(model(x), y) / 2)
        runtime.clip(optimizer, 0.01, algorithm)
        runtime.step(optimizer)
        optimizer.zero_grad()
        if index == 3:
            runtime.save(folder, updates=2)
    with torch.no_grad():
        model(x)
    return {name: whole(tensor.detach()).clone() for name, tensor in model.state_dict().items()}


def in_runtime(strategy: str, devices: int, *args: Any) -> dict[str, Tensor]:
    """Task: a loop of one's own."""
    runtime = trivet.Runtime(accelerator="cpu", strategy=strategy, devices=devices)
    found: dict[str, Tensor] = runtime.launch(loop, *args)
    return found


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_runtime_accumulates_clips_saves_and_loads(strategy: str, algorithm: str, tmp_path: Path) -> None:
    expected = in_runtime("single", 1, tmp_path / "single", algorithm, False)
    for weights in run(2, in_runtime, strategy, 2, tmp_path / "saved", algorithm, False):
        assert_same(weights, expected)
    for weights in run(2, in_runtime, strategy, 2, tmp_path / "saved", algorithm, True):
        assert_same(weights, expected)
    for weights in run(2, in_runtime, strategy, 2, tmp_path / "single", algorithm, True):
        assert_same(weights, expected)


PAST = {
    "itself": lambda model, net, x: net(x),
    "its module": lambda model, net, x: model.module(x),
    "a layer": lambda model, net, x: net[0](x),
}


def past(strategy: str, devices: int, way: str) -> str:
    """Task: the refusal of a forward that goes another way than through what setup returned, in the second update."""

    def train(runtime: trivet.Runtime) -> str:
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        model, optimizer = runtime.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.ones(2, 3)
        runtime.backward(model(x).mean())
        optimizer.step()
        with pytest.raises((ConfigurationError, RuntimeError)) as caught:
            runtime.backward(PAST[way](model, net, x).mean())
        return str(caught.value)

    text: str = trivet.Runtime(accelerator="cpu", strategy=strategy, devices=devices).launch(train)
    return text


@pytest.mark.parametrize("way", PAST)
@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_a_forward_past_the_wrapper_is_refused(strategy: str, way: str) -> None:
    devices = 1 if strategy == "single" else 2
    for text in run(devices, past, strategy, devices, way):
        if way == "a layer" and strategy in ("zero3", "fsdp"):
            assert "mixed torch.Tensor and DTensor" in text  # torch's own, since the layer never ran
        else:
            assert "past the module that runtime.setup returned" in text


def test_a_module_that_calls_itself_in_its_forward_is_none() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(self.layer(x), again=False) if again else self.layer(x)

    def train(runtime: trivet.Runtime) -> None:
        net = Twice()
        model, optimizer = runtime.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        runtime.backward(model(torch.ones(2, 3)).mean())
        optimizer.step()
        copy.deepcopy(net)(torch.ones(2, 3))
        with torch.no_grad():
            net(torch.ones(2, 3))

    trivet.Runtime(accelerator="cpu", strategy="single").launch(train)
