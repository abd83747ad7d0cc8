"""What a step costs, counted and not timed: frames, calls of our own, operations, waits, collectives; and imports."""

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext

import pytest
import ranks
import scalar
import torch
import trivet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from trivet.strategies.single import Single
from trivet.torch_compat import collectives_begun

PACKAGE = os.path.dirname(os.path.abspath(trivet.__file__))
OWN = [os.path.join(os.path.dirname(PACKAGE), part) for part in ("core", "strategies", "accelerators", "precision")]


def is_own(code):
    """Whether a code object is Trivet's: of the core or of a built-in plugin, which an editable install keeps apart."""
    return code.co_filename.startswith((PACKAGE, *OWN))


def frames_to_fit():
    """Our frames from here up to and including `Trainer.fit`."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if is_own(frame.f_code):
            found.append(frame.f_code.co_qualname)
            if frame.f_code.co_qualname == "Trainer.fit":
                break
        frame = frame.f_back
    return found[::-1]


class Plain(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.frames = {}

    def training_step(self, batch, batch_idx):
        self.frames["training_step"] = frames_to_fit()
        return self.layer(batch).mean()

    def configure_optimizers(self):
        module = self

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                module.frames["step"] = frames_to_fit()
                return super().step(closure)

        return Optimizer(self.parameters(), lr=0.1)


def fit(module, batches):
    data = [torch.ones(2, 2) for _ in range(batches)]
    scalar.trainer(strategy="single").fit(module, DataLoader(data, batch_size=None))


def test_frames():
    module = Plain()
    fit(module, 2)
    assert module.frames["training_step"][0] == module.frames["step"][0] == "Trainer.fit"
    assert len(module.frames["training_step"]) <= 8, module.frames["training_step"]
    assert len(module.frames["step"]) <= 6, module.frames["step"]


def own_calls(batches):
    """How often each of our functions is entered, generators resumed included, in a whole fit."""
    calls = Counter()

    def count(frame, event, argument):
        if event == "call" and is_own(frame.f_code):
            calls[frame.f_code.co_qualname] += 1

    module = Plain()
    module.training_step = lambda batch, batch_idx: module.layer(batch).mean()
    sys.setprofile(count)
    try:
        fit(module, batches)
    finally:
        sys.setprofile(None)
    return calls


def per_batch(count, *args):
    """The difference of two lengths."""
    count(10, *args)  # what is done once for a process
    few, many = count(20, *args), count(70, *args)
    return {name: (many[name] - few[name]) / 50 for name in many if many[name] > few[name]}


def test_calls_for_one_batch():
    """Lightning 2.6 makes 295. Whoever adds one has to take one away."""
    found = per_batch(own_calls)
    assert sum(found.values()) <= 11.5, found


class Halved(Single):
    def loss_of(self, micro, scale):
        return 0.5 * super().loss_of(micro, scale)


class Negated(Single):
    def backward(self, root, loss):
        super().backward(root, -loss)


@pytest.mark.parametrize(("strategy", "expected"), [(Single, -1.0), (Halved, -0.5), (Negated, 1.0)])
def test_the_short_way_of_one_process_leaves_out_no_override(strategy, expected):
    module = scalar.Scalar()
    scalar.trainer(strategy=strategy()).fit(module, scalar.loader([1.0]))
    assert module.history == [expected]


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))


def loader(batches):
    return DataLoader([torch.ones(2, 2) for _ in range(batches)], batch_size=None)


def operations(batches, options):
    module = Plain()
    module.training_step = lambda batch, batch_idx: module.layer(batch).mean()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    with Operations() as counted:
        scalar.trainer(strategy="single", **options).fit(module, loader(batches))
    return counted.found


def operations_by_hand(batches, options):
    module = Plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    context = torch.autocast("cpu", torch.bfloat16) if "precision" in options else nullcontext()
    with Operations() as counted:
        for batch in loader(batches):
            optimizer.zero_grad()
            with context:
                loss = module.layer(batch).mean()
            loss.backward()
            if "gradient_clip_val" in options:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return counted.found


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 1.0}], ids=str)
def test_no_tensor_is_made_that_the_plain_loop_does_not_make(options):
    ours, plain = per_batch(operations, options), per_batch(operations_by_hand, options)
    more = {name: (count, plain.get(name, 0)) for name, count in ours.items() if count > plain.get(name, 0) + 0.05}
    assert not more  # by operation: ours and the plain loop's


@pytest.mark.parametrize(("precision", "waits"), [("fp32", 0), ("bf16-mixed", 0), ("fp16-mixed", 1)])
def test_how_often_the_host_reads_a_number_of_the_device(precision, waits):
    found = per_batch(operations, {"precision": precision, "gradient_clip_val": 1.0})
    assert found.get("aten._local_scalar_dense.default", 0) == waits


def collectives(batches):
    """Of this rank, in a whole fit with ddp; and how often it walked over the parameters for frozen ones."""
    module = Plain()
    module.training_step = lambda batch, batch_idx: module.layer(batch).mean()
    trainer = scalar.trainer(strategy="ddp", devices=2, log_every_n_steps=10**6)
    begun, looks = [], []
    module.on_train_end = lambda: begun.append(collectives_begun())
    module.on_update_end = lambda: looks.append(module._run.engine.strategy.trainable)
    trainer.fit(module, loader(batches))
    return begun[0], len({id(found) for found in looks})


def test_one_collective_for_one_bucket_and_no_walk_over_parameters():
    ((few, _), _), ((many, walks), _) = ranks.on_two_ranks(collectives, 20), ranks.on_two_ranks(collectives, 60)
    assert (many - few) / 20 == 1  # 40 batches more are 20 updates more of two ranks
    assert walks == 1


FRESH = """
import json, sys, torch
before = set(sys.modules)
import trivet
trivet.Trainer
print(json.dumps(sorted(set(sys.modules) - before)))
class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
{fit}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

FIT = """
trainer = trivet.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(4, 1), 2))
"""

PLAIN = """
net = Net()
optimizer = net.configure_optimizers()
for batch in torch.utils.data.DataLoader(torch.ones(4, 1), 2):
    optimizer.zero_grad()
    net.training_step(batch, 0).backward()
    optimizer.step()
"""


def modules(text):
    code = FRESH.format(fit=text)
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    first, last = output.stdout.splitlines()[0], output.stdout.splitlines()[-1]
    return set(json.loads(first)), set(json.loads(last))


UNWANTED = (
    "torchmetrics", "tensorboard", "scipy", "sympy", "torch._dynamo", "torch._inductor", "rich", "transformers",
    "lightning_utilities", "packaging", "jsonargparse", "yaml", "cProfile", "cloudpickle",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.elastic",
    "trivet.session", "trivet.run", "trivet.loop",
)  # fmt: skip


def under(modules, package):
    return sorted(name for name in modules if name == package or name.startswith(f"{package}."))


def test_a_fit_in_one_process_imports_only_what_it_uses():
    (trainer, fitted), (_, plain) = modules(FIT), modules(PLAIN)
    assert not {package: under(trainer, package) for package in UNWANTED if under(trainer, package)}
    assert len(trainer) <= 60, sorted(trainer)  # each takes about a millisecond
    extra = fitted - plain
    for package in (
        "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.elastic",
        "torch.distributed.launcher", "rich", "jsonargparse", "yaml", "pytorch_lightning",
        "trivet.commands", "trivet.strategies.ddp", "trivet.accelerators.cuda", "trivet.precision.mixed",
    ):  # fmt: skip
        assert not under(extra, package)
