"""What stands between the user's call and the user's step: frames, calls of our own for one batch, imported modules."""

import json
import os
import subprocess
import sys
from collections import Counter

import scalar
import torch
import trivet
from torch import nn
from torch.utils.data import DataLoader

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


def test_calls_for_one_batch():
    """The difference of two lengths. Asked for are about 40; Lightning 2.6 makes 295."""
    own_calls(10)
    few, many = own_calls(20), own_calls(120)
    per_batch = {name: (many[name] - few[name]) / 100 for name in many if many[name] != few[name]}
    assert sum(per_batch.values()) <= 40, per_batch


FRESH = """
import json, sys, torch
before = set(sys.modules)
import trivet
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
    return set(json.loads(output.stdout.splitlines()[-1]))


def test_a_fit_in_one_process_imports_only_what_it_uses():
    extra = modules(FIT) - modules(PLAIN)
    for package in (
        "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.elastic",
        "torch.distributed.launcher", "rich", "jsonargparse", "yaml", "pytorch_lightning",
        "trivet.commands", "trivet.strategies.ddp", "trivet.accelerators.cuda", "trivet.precision.mixed",
    ):  # fmt: skip
        found = sorted(name for name in extra if name == package or name.startswith(f"{package}."))
        assert not found, f"{package}: {found}"
