"""`fit` on two processes from a script, ``python -c``, an interactive session and pytest; and Ctrl-C."""

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import trivet
from torch import nn
from torch.utils.data import DataLoader
from trivet.errors import LaunchError

MODEL = """
import json, os, sys, torch, trivet
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader

class Net(trivet.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.note = "before"
    def training_step(self, batch, batch_idx):
        self.note = "changed in the worker"
        self.log("loss", 1.0)
        return self.layer(batch).mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", batch.mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

class Counter(trivet.Callback):
    batches = 0
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches += 1
    def state_dict(self):
        return {"batches": self.batches}
    def load_state_dict(self, state):
        self.batches = state["batches"]

def main(out):
    net, counter = Net(), Counter()
    trainer = trivet.Trainer(
        accelerator="cpu", devices=2, max_epochs=2, callbacks=[counter], default_root_dir=out, logger=False,
        enable_progress_bar=False,
    )
    data = torch.ones(8, 1)
    trainer.fit(net, DataLoader(data, 2), DataLoader(torch.arange(5.0).view(5, 1), 1))
    Path(out, "result.json").write_text(json.dumps({
        "weight": net.layer.weight.item(), "note": net.note, "batches": counter.batches,
        "metrics": trainer.callback_metrics, "progress": trainer.progress.to_dict(),
        "checkpoint": trainer.checkpoint_callback.best_model_path, "launched": "RANK" in os.environ,
    }))
"""


def check(out):
    """The caller has weights, the callbacks' state, metrics, progress and checkpoint paths, and nothing else."""
    found = json.loads((out / "result.json").read_text())
    assert found["weight"] == -4.0
    assert found["note"] == "before"
    assert found["batches"] == 4
    assert found["metrics"] == {"loss": 1.0, "val": 2.0}
    assert (found["progress"]["update"], found["progress"]["epoch"], found["progress"]["samples"]) == (4, 2, 16)
    assert Path(found["checkpoint"], "manifest.json").exists()
    assert not found["launched"]
    assert not list(out.glob("version_*/pid"))


def interpreter(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.Popen([sys.executable, *arguments], **options)


def run(*arguments, **options):
    process = interpreter(*arguments, **options)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("guard", [True, False], ids=["main guard", "no main guard"])
def test_a_script(tmp_path, guard):
    call = f"main({str(tmp_path)!r})"
    text = f'if __name__ == "__main__":\n    {call}\n' if guard else f"{call}\n"
    (tmp_path / "train.py").write_text(MODEL + text)
    run(str(tmp_path / "train.py"), cwd=tmp_path)
    check(tmp_path)


def test_python_c(tmp_path):
    run("-c", f"{MODEL}\nmain({str(tmp_path)!r})\n", cwd=tmp_path)
    check(tmp_path)


def test_an_interactive_session(tmp_path):
    controller, terminal = pty.openpty()
    process = interpreter("-i", "-q", stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path)
    os.close(terminal)
    shown = []

    def read():
        try:
            while data := os.read(controller, 4096):
                shown.append(data.decode())
        except OSError:  # how a terminal says that it was closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    typed = MODEL.replace("\n\n", "\n").replace("\nclass", "\n\nclass").replace("\ndef", "\n\ndef")
    os.write(controller, f"{typed}\n\nmain({str(tmp_path)!r})\nexit()\n".encode())
    try:
        process.wait(timeout=120)
    finally:
        process.kill()
        reader.join(5)
        os.close(controller)
    assert (tmp_path / "result.json").exists(), "".join(shown)
    check(tmp_path)


class InThisFile(trivet.Module):
    """A class that lives in a test file."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def quiet(**options):
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return trivet.Trainer(accelerator="cpu", **({"max_epochs": 1} | off | options))


def test_from_pytest():
    module = InThisFile()
    trainer = quiet(devices=2)
    trainer.fit(module, DataLoader(torch.ones(8, 1), 2))
    assert module.layer.weight.item() == -2.0
    assert trainer.progress.update == 2
    assert trainer.world_size == 1  # the caller is no rank
    trainer.fit(module, DataLoader(torch.ones(8, 1), 2))  # and once more, from where it is
    assert module.layer.weight.item() == -4.0


def test_what_cannot_be_handed_over_is_named_by_its_path():
    module = InThisFile()
    module.layer.lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"^module\.layer\.lock \(a _thread\.lock\) cannot be handed to worker"):
        quiet(devices=2).fit(module, DataLoader(torch.ones(8, 1), 2))
    data = DataLoader([torch.ones(1)] * 8, 2, sampler=(i for i in range(8)))
    with pytest.raises(LaunchError, match=r"^train_dataloaders.*sampler \(a generator\)"):
        quiet(devices=2).fit(InThisFile(), data)
    callback = trivet.Callback()
    callback.connections = {"main": [threading.Lock()]}
    with pytest.raises(LaunchError, match=r"^trainer\.callbacks\[0\]\.connections\['main'\]\[0\] \(a _thread\.lock\)"):
        quiet(devices=2, callbacks=[callback]).fit(InThisFile(), DataLoader(torch.ones(8, 1), 2))


# Ctrl-C

ENDLESS = MODEL + textwrap.dedent("""
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    class Slow(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                Path("ready-%s" % os.environ.get("RANK", "0")).write_text(str(os.getpid()))
            if "stuck" in sys.argv and batch_idx == 3:
                time.sleep(60)
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)
        def on_exception(self, exception):
            Path("exception-%d" % self.global_rank).write_text(f"{type(exception).__name__} {self.global_step}")
        def teardown(self, stage):
            Path("teardown-%s" % os.environ.get("RANK", "0")).touch()

    def trainer(**options):
        return trivet.Trainer(
            accelerator="cpu", devices=int(sys.argv[1]), enable_progress_bar=False, logger=False,
            callbacks=[trivet.Checkpoint("saved", save_on_exception=True)], **options,
        )

    def data():
        return DataLoader(torch.ones(10_000, 1), 1)

    if __name__ == "__main__":
        if "resume" in sys.argv:
            (path,) = Path("saved").glob("*=*")
            net = Slow()
            job = trainer(max_steps=int(path.name.rsplit("=", 1)[1]) + 2)
            job.fit(net, data(), ckpt_path=path)
            print("RESUMED", job.progress.update, net.layer.weight.item())
        else:
            trainer(max_epochs=1).fit(Slow(), data())
""")


def gone(ids, seconds=10):
    limit = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in ids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def start(tmp_path, world_size, *words):
    (tmp_path / "train.py").write_text(ENDLESS)
    process = interpreter("train.py", str(world_size), *words, cwd=tmp_path)
    files = [tmp_path / f"ready-{rank}" for rank in range(world_size)]
    limit = time.monotonic() + 90
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < limit, "training did not start"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    return process, [int(file.read_text()) for file in files]


@pytest.mark.parametrize("world_size", [1, 2])
def test_ctrl_c_ends_at_the_next_update_with_a_checkpoint_that_resumes(tmp_path, world_size):
    process, ids = start(tmp_path, world_size)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert output.rstrip().endswith("KeyboardInterrupt")
    assert gone(ids)
    ends = {(tmp_path / f"exception-{rank}").read_text() for rank in range(world_size)}
    assert len(ends) == 1  # all ranks after the same update
    kind, update = ends.pop().split()
    assert kind == "KeyboardInterrupt"
    assert all((tmp_path / f"teardown-{rank}").exists() for rank in range(world_size))
    (saved,) = (tmp_path / "saved").glob("*=*")
    assert saved.name.endswith(f"update={update}")
    output = run("train.py", str(world_size), "resume", cwd=tmp_path)
    assert f"RESUMED {int(update) + 2} {-float(update) - 2}" in output


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_ctrl_c_ends_at_once(tmp_path, world_size):
    process, ids = start(tmp_path, world_size, "stuck")
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20  # the step would sleep for a minute
    assert process.returncode != 0
    assert "KeyboardInterrupt" in output
    assert gone(ids)
