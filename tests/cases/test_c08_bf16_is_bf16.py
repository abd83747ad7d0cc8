"""C08: a precision that was asked for is what runs, however it and the accelerator were spelled."""

import re

import dtypes
import pytest
import scalar
import torch
import trivet
from ranks import run
from torch import nn
from trivet.accelerators.cpu import CPU
from trivet.errors import PlanMismatch
from trivet.plugins import Policy
from trivet.precision.full import FP32
from trivet.precision.mixed import BF16Mixed, FP16Mixed
from trivet.precision.true import BF16True
from trivet.strategies.single import Single

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Recorder(trivet.Module):
    """Notes the dtype of a linear layer's output in training and in validation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = {}

    def training_step(self, batch, batch_idx):
        output = self.layer(batch)
        self.seen["train"] = output.dtype
        return output.float().pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.seen["val"] = self.layer(batch).dtype

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def data():
    return torch.utils.data.DataLoader(torch.randn(8, 4), 2)


def train(accelerator, precision):
    module = Recorder()
    trainer = scalar.trainer(accelerator=accelerator, precision=precision, max_epochs=1)
    states = []
    module.on_train_end = lambda: states.extend(
        value.dtype for state in trainer.optimizers[0].state.values() for value in state.values() if value.ndim
    )
    trainer.fit(module, data(), data())
    plan = trainer.plan(module)
    return {
        **module.seen,
        "stored": {t.dtype for p in module.parameters() for t in (p, p.grad) if t is not None} | set(states),
        "plan": (plan.precision, plan.param_dtype, plan.compute_dtype),
        "printed": str(plan),
    }


SPELLINGS = {
    "names": ("cpu", "bf16"),
    "full name": ("cpu", "bf16-mixed"),
    "objects": (CPU(), BF16Mixed()),
    "accelerator object": (CPU(), "bf16"),
    "mappings": ({"name": "cpu"}, {"name": "bf16"}),
    "class path": ({"class_path": "trivet.accelerators.cpu.CPU"}, {"class_path": "trivet.precision.mixed.BF16Mixed"}),
    "qualified": ("trivet:cpu", "trivet:bf16-mixed"),
    "auto": ("auto", "bf16"),
    "fp16 by name": ("cpu", "16-mixed"),
    "fp16 object": (CPU(), FP16Mixed()),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_spelling_computes_in_sixteen_bits(world_size):
    for rank in run(world_size, lambda: {name: train(*spelling) for name, spelling in SPELLINGS.items()}):
        for name, seen in rank.items():
            kind = "fp16" if "fp16" in name else "bf16"
            assert seen["train"] == seen["val"] == DTYPES[kind], name
            assert seen["stored"] == {torch.float32}, name
            assert seen["plan"][1:] == ("float32", str(DTYPES[kind]).removeprefix("torch.")), name
            assert f"{kind}-mixed" in seen["printed"], name


STRATEGIES = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "fsdp": 2}  # by the number of processes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_everything_has_the_dtype_that_the_plan_states(strategy):
    """Parameters, buffers, compute, outputs, gradients, what is communicated, and optimizer state."""
    devices = STRATEGIES[strategy]
    for rank in run(devices, dtypes.train_each, strategy, devices, dtypes.PRECISIONS):
        for precision, seen in zip(dtypes.PRECISIONS, rank, strict=True):
            dtypes.assert_as_planned(seen, f"{strategy} with {precision}")
            assert seen.gradients
            assert seen.stepped
            assert seen.communicated or devices == 1


class Compressed(FP32):
    policy = Policy(torch.float32, torch.float32, reduce=torch.bfloat16)


class Careful(BF16True):
    policy = Policy(torch.bfloat16, torch.bfloat16, reduce=torch.float32)


class FromTheBaseClass(trivet.Strategy):
    pass


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "zero3", FromTheBaseClass()])
def test_gradients_travel_in_the_dtype_of_the_policy_where_it_is_another_one(strategy):
    for rank in run(2, dtypes.train_each, strategy, 2, [Compressed(), Careful()]):
        for seen in rank:
            dtypes.assert_as_planned(seen, str(strategy))


class Forgetful(BF16Mixed):
    """Says bfloat16 and computes in float32."""

    def forward_context(self, device_type):
        return torch.autocast(device_type, enabled=False)


class Narrow(FP32):
    """Says float32 and stores parameters in bfloat16."""

    def convert(self, module):
        return BF16True().convert(module)

    cast_batch = BF16True.cast_batch


class NarrowBuffers(FP32):
    """Says float32 and stores buffers in bfloat16."""

    def convert(self, module):
        for buffer in module.buffers():
            buffer.data = buffer.data.bfloat16()
        return module


LIES = {
    "compute": (Forgetful(), r"gave \['float32'\], planned bfloat16 \(layers: '.+' float32\)"),
    "parameters": (Narrow(), r"parameter 'first.weight' is stored as bfloat16, planned float32"),
    "buffers": (NarrowBuffers(), r"buffer 'offset' is bfloat16, planned float32"),
}


def refusal(strategy, devices, precision):
    """Task: what the first update says, in a process that goes on."""
    with pytest.raises(trivet.errors.TrivetError) as caught:  # a rank's own, or that of the one that was faster
        dtypes.train(strategy, devices, precision)
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", LIES)
def test_a_plan_that_is_not_kept_is_an_error(what, strategy):
    precision, message = LIES[what]
    devices = STRATEGIES[strategy]
    for text in run(devices, refusal, strategy, devices, precision):
        assert re.search(message, text), text


class Copying(Single):
    """Says that the optimizer's state is in float32, and keeps it as the parameters are."""

    def state_dtype(self, policy):
        return torch.float32


def test_optimizer_state_in_another_dtype_is_an_error():
    with pytest.raises(PlanMismatch, match="AdamW keeps 'exp_avg' in bfloat16, planned float32"):
        dtypes.train(Copying(), 1, "bf16-true")
    plan = scalar.trainer(strategy=Copying(), precision="bf16-true").plan()
    assert "bfloat16; the optimizer steps a copy in float32" in " ".join(str(plan).split())


def test_a_plan_that_is_not_kept_in_storage_is_an_error():
    class Wide(Recorder):
        def configure_model(self):
            self.layer = nn.Linear(4, 4, dtype=torch.float64)

        def training_step(self, batch, batch_idx):
            self.layer.double()
            return super().training_step(batch.double(), batch_idx)

    with pytest.raises(PlanMismatch, match=r"parameter 'layer.weight' is stored as float64, planned float32"):
        scalar.trainer(max_epochs=1).fit(Wide(), data())


def test_the_runtime_computes_in_it_too():
    def loop(runtime):
        model = nn.Linear(4, 4)
        model, _ = runtime.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return model(torch.randn(2, 4)).dtype

    assert trivet.Runtime(accelerator="cpu", precision="bf16").launch(loop) == torch.bfloat16
