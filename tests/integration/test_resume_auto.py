"""The same command again and again; ``last`` and ``best`` of a run that another process made."""

import csv
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import scalar
import torch
import trivet
from torch.utils.data import DataLoader
from trivet import rundir
from trivet.checkpoint import directory
from trivet.checkpoint.newest import best, complete, newest
from trivet.commands import entry
from trivet.errors import ConfigurationError
from trivet.resume import located


class Net(trivet.Module):
    def __init__(self, lr: float = 0.1, stop: int = -1):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.lr, self.stop = lr, stop

    def training_step(self, batch, batch_idx):
        if self.trainer.progress.update == self.stop:
            raise RuntimeError("stop here")
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)

    def train_dataloader(self):
        return DataLoader([torch.tensor([float(i)]) for i in range(8)], 2, shuffle=True)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


FLAGS = (
    "fit", "--accelerator", "cpu", "--devices", "1", "--enable_progress_bar", "false", "--log_every_n_steps", "1",
    "--resume", "auto", "--callbacks", "Checkpoint", "--callbacks.every_n_updates", "3",
)  # fmt: skip


def fit(*flags):
    code, trainer = entry.run([*FLAGS, "--model", f"{__name__}.Net", *flags], prog="trivet")
    assert code == 0
    return trainer


def steps(run):
    with Path(run, "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def runs():
    return sorted(path.name for path in Path("trivet_runs").iterdir())


def test_the_same_command_goes_on_in_its_directory_until_it_has_ended(capsys):
    with pytest.raises(RuntimeError, match="stop here"):
        fit("--max_epochs", "2", "--model.stop", "5")
    before = newest([Path("trivet_runs/version_0/checkpoints")])
    assert before.boundary == (3, 0)
    assert "begins afresh" in capsys.readouterr().err
    stored = Path("trivet_runs/version_0/run.json")
    stored.write_text(stored.read_text().replace('"stop": 5', '"stop": -1'))  # as if it had been killed
    trainer = fit("--max_epochs", "2")
    assert trainer.progress.update == 8
    assert f"going on from {before.path} (0 epochs, 3 updates)" in capsys.readouterr().err
    assert runs() == ["version_0"]
    assert steps("trivet_runs/version_0") == list(range(1, 9))  # none twice
    fit("--max_epochs", "2")
    told = capsys.readouterr()
    assert "the run in trivet_runs/version_0 has ended (2 epochs, 8 updates; checkpoint: " in told.err
    assert "fit: 2 epochs, 8 updates" in told.out
    assert fit("--max_epochs", "3").progress.update == 12
    assert steps("trivet_runs/version_0") == list(range(1, 13))
    assert len(list(Path("trivet_runs/version_0").glob("config*.yaml"))) == 3  # of what was different


def test_another_job_begins_a_run_of_its_own(capsys):
    fit("--max_epochs", "1")
    capsys.readouterr()
    fit("--max_epochs", "1", "--model.lr", "0.2")
    assert "is of another job: command.model.lr was 0.1 and is 0.2 (trivet_runs/version_0)" in capsys.readouterr().err
    fit("--max_epochs", "2")  # finds the older one
    assert runs() == ["version_0", "version_1"]
    assert steps("trivet_runs/version_0") == list(range(1, 9))


def test_in_a_directory_without_versions_another_job_is_refused(capsys):
    fit("--max_epochs", "1", "--logger", "false")
    assert fit("--max_epochs", "2", "--logger", "false").progress.update == 8
    capsys.readouterr()
    flags = [*FLAGS, "--model", f"{__name__}.Net", "--max_epochs", "2", "--logger", "false", "--model.lr", "0.2"]
    assert entry.run(flags, prog="trivet")[0] == 2
    assert "'trivet_runs' holds the run of another job: command.model.lr was 0.1" in capsys.readouterr().err


def test_a_run_that_is_alive_is_left_alone(capsys):
    fit("--max_epochs", "1")
    handle = os.open("trivet_runs/version_0", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    flags = [*FLAGS, "--model", f"{__name__}.Net", "--max_epochs", "2"]
    assert entry.run(flags, prog="trivet")[0] == 2
    os.close(handle)
    told = capsys.readouterr().err
    assert f"'trivet_runs/version_0' goes on in another process (that began as process {os.getpid()} on " in told
    assert fit("--max_epochs", "2").progress.update == 8


BOTH = """
import sys, time, torch, trivet
from pathlib import Path
from test_resume_auto import Net

class Waits(Net):
    def on_train_start(self):
        while not Path("go").exists():
            time.sleep(0.02)

Path(f"ready-{sys.argv[1]}").touch()
while not Path("start").exists():
    time.sleep(0.005)
checkpoint = trivet.Checkpoint(every_n_updates=3)
trainer = trivet.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[checkpoint], resume="auto",
    enable_progress_bar=False, logger=sys.argv[2] == "True")
trainer.fit(Waits())
"""


@pytest.mark.parametrize("logger", [True, False])
def test_of_two_fresh_ones_at_once_the_second_is_refused(tmp_path, logger):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *map(str, sys.path)])}
    both = [
        subprocess.Popen([sys.executable, "-c", BOTH, str(n), str(logger)], env=env, stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    wait_for(lambda: all(Path(f"ready-{n}").exists() for n in range(2)))
    Path("start").touch()
    wait_for(lambda: any(one.poll() is not None for one in both))
    Path("go").touch()
    texts = [one.communicate(timeout=60)[1] for one in both]
    codes = [one.returncode for one in both]
    assert sorted(codes) == [0, 1], texts
    first = both[codes.index(0)]
    assert f"goes on in another process (that began as process {first.pid} on " in texts[codes.index(1)]
    assert len(list(Path("trivet_runs").rglob("run.json"))) == 1


def wait_for(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_without_locks_the_process_that_is_named_is_looked_for(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with rundir.deciding(tmp_path), rundir.held(tmp_path) as free:
        assert free
    rundir.Record({}, process=os.getppid()).write(tmp_path)
    with rundir.held(tmp_path) as free:
        assert not free
    rundir.Record({}, process=os.getppid(), host="another").write(tmp_path)
    with rundir.held(tmp_path) as free:
        assert free
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    rundir.Record({}, process=gone.pid).write(tmp_path)
    with rundir.held(tmp_path) as free:
        assert free


def python(*, module, **options):
    checkpoint = trivet.Checkpoint(every_n_updates=3)
    trainer = scalar.trainer(enable_checkpointing=True, callbacks=[checkpoint], logger=True, **options)
    trainer.fit(module)
    return trainer


def test_a_python_caller_has_the_weights_of_a_run_that_had_ended():
    first = Net()
    python(resume="auto", max_epochs=1, module=first)
    again = Net()
    trainer = python(resume="auto", max_epochs=1, module=again)
    assert trainer.progress.update == 4
    assert torch.equal(first.layer.weight, again.layer.weight)
    assert runs() == ["version_0"]


def test_a_rename_that_a_kill_cut_short_is_finished_before_anything_is_read():
    python(resume="auto", max_epochs=1, module=Net())
    place = Path("trivet_runs/version_0/checkpoints")
    (path,) = place.iterdir()
    path.rename(place / f".{path.name}.old-0123456789ab")  # between the two renames of a save in its place
    (place / f".{path.name}.tmp-0123456789ab").mkdir()  # whose temporary directory is not complete
    assert python(resume="auto", max_epochs=2, module=Net()).progress.update == 8
    assert not list(place.glob(".*"))


def test_last_and_best_are_found_by_another_process():
    def save(update, metric, created):
        path = Path("trivet_runs", f"version_{update // 10}", "checkpoints", f"u{update}")
        state = trivet.state.TrainState(progress={"update": update, "epoch": 0})
        directory.write(path, state, rank=0, world_size=1, metrics={"val": metric} if metric is not None else {})
        text = (path / "manifest.json").read_text()
        before = directory.manifest(path)["created"]
        (path / "manifest.json").write_text(text.replace(before, f"2026-01-01T00:00:{created:02}+00:00"))
        return path.absolute()

    save(3, 0.1, 9)
    low, last = save(11, 0.5, 10), save(13, None, 12)
    save(12, 0.7, 11)
    torn = save(14, 0.0, 13)
    (torn / "state.pt").write_bytes(b"")
    Path("trivet_runs/version_2").mkdir()
    trainer = scalar.trainer(enable_checkpointing=True, callbacks=[trivet.Checkpoint(monitor="val")], logger=True)
    assert located(trainer, "last") == str(last)
    assert located(trainer, "best") == str(low)
    assert located(trainer, str(low)) == str(low)
    place = Path("trivet_runs/version_1/checkpoints")
    assert [found.path.name for found in complete([place])] == ["u11", "u12", "u13"]
    assert best(place, "val", "max").path.name == "u12"
    assert best(place, None, "min").path == last
    other = scalar.trainer(enable_checkpointing=True, logger=True, default_root_dir="elsewhere")
    with pytest.raises(ConfigurationError, match=r"ckpt_path='last': no Checkpoint .* complete one in 'elsewhere'"):
        other.fit(Net(), ckpt_path="last")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "yes"}, "resume='yes': allowed are None, 'auto'"),
        ({"max_restarts": -1}, "max_restarts=-1: expected a whole number from 0 up"),
        ({"min_devices": 0}, "min_devices=0: expected a whole number from 1 up, or None"),
        ({"min_devices": 3, "devices": 2}, "min_devices=3 is more than devices=2"),
    ],
)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        scalar.trainer(**options)


def test_two_wishes_where_to_go_on_from_are_refused():
    trainer = scalar.trainer(resume="auto")
    with pytest.raises(ConfigurationError, match="resume='auto' and ckpt_path='x' both say"):
        trainer.fit(Net(), ckpt_path="x")
    with pytest.raises(ConfigurationError, match="there is nothing to go on from"):
        trainer.fit(Net())


def test_who_starts_the_processes_starts_them_again(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigurationError, match=r"max_restarts=2: torchrun started .* Give torchrun --max-restarts N"):
        scalar.trainer(max_restarts=2)
