"""C29: an accelerator of another distribution is selected by name alone and really used; two of one name clash."""

import os
import subprocess
import sys
import textwrap

import pytest

ACCELERATOR = '''
import atexit, json, os
import torch
from trivet.plugins import Accelerator

CALLS = []


class Fake(Accelerator):
    """CPU tensors, and books about what was put on the device."""

    device_type = "cpu"
    collective_backend = None
    moves_batches = True

    @property
    def offers(self):
        return frozenset({"dtype:float32", "dtype:bfloat16", "autocast:bfloat16"})

    def is_available(self):
        return True

    def device_count(self):
        return 1

    def device(self, local_rank):
        CALLS.append(f"device {local_rank}")
        return torch.device("cpu", 0)

    def setup(self, device):
        CALLS.append(f"setup {device}")

    def teardown(self):
        CALLS.append("teardown")

    def to_device(self, batch, device):
        CALLS.append(f"to_device {device}")
        return batch.as_subclass(Placed)

    def seed(self, seed):
        CALLS.append("seed")

    def step_boundary(self):
        CALLS.append("step_boundary")


class Placed(torch.Tensor):
    """A tensor that was placed on the fake device."""


atexit.register(lambda: print("CALLS " + json.dumps(CALLS)))
'''

MODEL = """
import torch, trivet
from torch.utils.data import DataLoader

contexts = []
autocast = torch.autocast
torch.autocast = lambda *args, **options: contexts.append(args[0]) or autocast(*args, **options)

class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch, batch_idx):
        output = self.layer(batch)
        if batch_idx == 0:
            print("STEP", type(batch).__name__, output.dtype, self.device, contexts)
        return output.float().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(torch.randn(4, 2), 2)
"""

OFF = "--logger --enable_checkpointing --enable_progress_bar"
FLAGS = ["--devices", "1", "--max_epochs", "1", *(part for flag in OFF.split() for part in (flag, "false"))]


def distribution(root, name, version, module, text, entry):
    """What pip would leave of a wheel: the module and its metadata."""
    where = root / name
    info = where / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (where / f"{module}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[trivet.accelerators]\n{entry}\n")
    (info / "RECORD").write_text("")
    return where


@pytest.fixture
def run(tmp_path):
    """Runs ``trivet`` in a directory with a model, with these distributions installed."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.py").write_text(textwrap.dedent(MODEL))

    def run(*arguments, installed):
        process = subprocess.run(
            [sys.executable, "-m", "trivet", *arguments],
            cwd=tmp_path / "work",
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, installed))},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return process.returncode, process.stdout, process.stderr

    return run


@pytest.fixture
def fake(tmp_path):
    return distribution(tmp_path, "acme-fake", "1.2.3", "acme_fake", ACCELERATOR, "fake = acme_fake:Fake")


def test_it_is_selected_by_name_and_really_used(run, fake):
    flags = ["--model", "mine.Net", "--accelerator", "fake", "--precision", "bf16", *FLAGS]
    code, out, err = run("fit", *flags, installed=[fake])
    assert code == 0, err
    assert "STEP Placed torch.bfloat16 cpu:0 ['cpu']" in out
    calls = out.split("CALLS ")[1].split('"')[1::2]
    assert calls[:2] == ["device 0", "setup cpu:0"]
    assert calls.count("to_device cpu:0") == calls.count("step_boundary") == 2
    assert "seed" in calls
    assert calls[-1] == "teardown"


def test_it_is_listed_with_distribution_and_version(run, fake):
    code, out, _ = run("plugins", "accelerator", installed=[fake])
    assert code == 0
    row = next(line for line in out.splitlines() if "acme" in line)
    assert row.split() == ["fake", "acme-fake", "1.2.3", "acme_fake:Fake"]
    assert "CALLS" not in out  # nothing was imported


def test_the_plan_names_it(run, fake):
    code, out, _ = run("plan", "--accelerator", "fake", "--devices", "1", installed=[fake])
    assert code == 0
    assert "fake" in out
    assert "acme-fake 1.2.3" in out


def test_what_it_does_not_offer_is_refused_and_never_replaced(run, fake):
    for flags, named in (
        (["--precision", "fp16"], "float16"),
        (["--devices", "2"], "acme-fake"),
    ):
        options = dict(zip(FLAGS[::2], FLAGS[1::2], strict=True)) | dict([flags])
        line = [part for pair in options.items() for part in pair]
        code, out, err = run("fit", "--model", "mine.Net", "--accelerator", "fake", *line, installed=[fake])
        assert code == 2
        assert "STEP" not in out
        assert named in err
        assert "acme-fake 1.2.3" in err


def test_a_second_distribution_of_that_name_is_an_error_that_names_both(run, fake, tmp_path):
    other = distribution(
        tmp_path, "rival-fake", "9.0", "rival_fake", "raise RuntimeError('broken')", "fake = rival_fake:F"
    )
    flags = ["--model", "mine.Net", *FLAGS, "--accelerator"]
    code, out, err = run("fit", *flags, "fake", installed=[fake, other])
    assert code == 2
    assert "STEP" not in out
    assert "acme-fake" in err
    assert "rival-fake" in err
    assert "acme-fake:fake" in err
    code, out, err = run(
        "fit", *flags, "acme-fake:fake", installed=[fake, other]
    )  # says which; the broken one is left alone
    assert code == 0, err
    assert "STEP Placed torch.float32" in out
    code, out, err = run("plugins", installed=[fake, other])
    assert code == 0
    assert "acme-fake" in out
    assert "rival-fake" in out


def test_an_unknown_name_is_not_the_cpu(run, fake):
    code, out, err = run("fit", "--model", "mine.Net", *FLAGS, "--accelerator", "faek", installed=[fake])
    assert code == 2
    assert "Did you mean 'fake'?" in err
    assert "STEP" not in out
