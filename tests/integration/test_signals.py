"""Signals end a fit between two updates, with a checkpoint, wherever they arrive; the next start goes on from it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ranks
import scalar
import trivet
from forked import Server
from trivet.checkpoint import manifest
from trivet.checkpoint.newest import complete, newest
from trivet.errors import Terminated

HERE = Path(__file__).parent
FLAGS = (
    "fit", "--resume", "auto", "--accelerator", "cpu", "--enable_progress_bar", "false", "--log_every_n_steps", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    found = Server()
    yield found
    found.close()


def arguments(root, *flags):
    return *FLAGS, *flags, "--default_root_dir", str(root)


def until_logged(root, updates, log):
    """Wait until so many updates have a row."""
    path, limit = root / "version_0" / "metrics.csv", time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") <= updates:
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.005)


def saved(root):
    return newest([root / "version_0" / "checkpoints"])


@pytest.mark.parametrize("world_size", [2, 0])
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint_to_go_on_from(server, tmp_path, world_size):
    log = tmp_path / "log"
    flags = ("--strategy", "ddp" if world_size else "single", "--max_steps", "60", "--model.pause", "0.05")
    ranks = server.start(*arguments(tmp_path, *flags), log=log, world_size=world_size)
    until_logged(tmp_path, 3, log)
    os.kill(ranks.pids[-1], signal.SIGTERM)
    assert server.codes(ranks) == [143] * len(ranks.pids), log.read_text()
    (found,) = complete([tmp_path / "version_0" / "checkpoints"])
    update = found.manifest["progress"]["update"]
    assert 3 <= update < 60
    said = f"trivet: SIGTERM: training ended after update {update}; checkpoint: {found.path}\n"
    assert log.read_text().count(said) == 1
    assert "Traceback" not in log.read_text()
    ranks = server.start(*arguments(tmp_path, *flags), log=log, world_size=world_size)
    assert server.codes(ranks) == [0] * len(ranks.pids), log.read_text()
    assert f"trivet: going on from {found.path}" in log.read_text()
    assert saved(tmp_path).manifest["progress"]["update"] == 60
    assert len(complete([tmp_path / "version_0" / "checkpoints"])) == 1  # what the signal left was not for good


def test_a_second_one_ends_at_once(server, tmp_path):
    log = tmp_path / "log"
    ranks = server.start(*arguments(tmp_path, "--max_steps", "9", "--model.pause", "30"), log=log, world_size=0)
    limit = time.monotonic() + 60
    while not (tmp_path / "version_0" / "hparams.yaml").exists():  # training is about to begin
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(ranks.pids[0], signal.SIGTERM)
    time.sleep(0.3)
    assert ranks.alive
    os.kill(ranks.pids[0], signal.SIGTERM)
    ranks.wait(5)
    assert server.codes(ranks) == [-signal.SIGTERM]
    assert saved(tmp_path) is None


def test_slurms_warning_counts_in_a_job_of_slurms_only(server, tmp_path):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    for name, variables, code in (("in", slurm, 138), ("out", {}, -signal.SIGUSR1)):
        root, log = tmp_path / name, tmp_path / f"{name}.log"
        flags = arguments(root, "--max_steps", "500", "--model.pause", "0.02")
        ranks = server.start(*flags, log=log, world_size=0, **variables)
        until_logged(root, 3, log)
        os.kill(ranks.pids[0], signal.SIGUSR1)
        assert server.codes(ranks) == [code], log.read_text()
        assert (saved(root) is not None) == (name == "in")


def test_without_a_checkpoint_callback_that_is_said(server, tmp_path):
    log = tmp_path / "log"
    flags = [flag for flag in arguments(tmp_path, "--max_steps", "500") if flag not in ("--resume", "auto")]
    flags += ["--enable_checkpointing", "false", "--model.pause", "0.02"]
    ranks = server.start(*flags, log=log, world_size=0)
    until_logged(tmp_path, 2, log)
    os.kill(ranks.pids[0], signal.SIGTERM)
    assert server.codes(ranks) == [143]
    assert "no checkpoint was saved, since there is no Checkpoint callback" in log.read_text()


def test_the_launcher_alone_gets_it(tmp_path):
    command = [sys.executable, str(HERE / "going_on.py"), *arguments(tmp_path, "--devices", "2", "--max_steps", "500")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, "--model.pause", "0.02"], stdout=log, stderr=log, cwd=tmp_path)
    until_logged(tmp_path, 2, tmp_path / "log")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    text = (tmp_path / "log").read_text()
    assert text.count("trivet: SIGTERM: training ended after update") == 1
    assert "Traceback" not in text
    assert saved(tmp_path) is not None


def fit(**options):
    module = scalar.Scalar()

    def stop(module=module):
        if module.trainer.progress.update == 3:
            signal.raise_signal(signal.SIGTERM)

    module.on_train_batch_end = lambda *args: stop()
    trainer = scalar.trainer(max_epochs=4, **options)
    trainer.fit(module, scalar.loader([1.0] * 4))


def test_a_python_caller_gets_an_exception_that_ends_a_script_with_143(tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    checkpoint = trivet.Checkpoint(tmp_path)
    with pytest.raises(Terminated) as caught:
        fit(enable_checkpointing=True, callbacks=[checkpoint])
    assert isinstance(caught.value, SystemExit)
    assert (caught.value.code, caught.value.signal, caught.value.update) == (143, signal.SIGTERM, 3)
    assert caught.value.checkpoint == checkpoint.last_model_path == str(saved_in(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is before
    assert "training ended after update 3" in capsys.readouterr().err


def end_of_epoch(folder):
    """The last rank gets SIGTERM when the first of three epochs has ended; what is left by then, and at the end."""
    module, size = scalar.Scalar(), int(os.environ.get("WORLD_SIZE", "1"))
    options = {"strategy": "ddp" if size > 1 else "single", "devices": size, "max_epochs": 3, "min_epochs": 2}
    options |= {"enable_checkpointing": True, "callbacks": [trivet.Checkpoint(folder)]}

    def stop():
        if module.global_rank == size - 1 and module.trainer.progress.epoch == 0:
            signal.raise_signal(signal.SIGTERM)

    module.on_train_epoch_end = stop
    with pytest.raises(Terminated) as caught:
        scalar.trainer(**options).fit(module, scalar.loader([1.0] * 4))
    ended = caught.value.signal, caught.value.update, manifest.read(Path(caught.value.checkpoint))["progress"]["epoch"]
    module = scalar.Scalar()
    scalar.trainer(**options).fit(module, scalar.loader([1.0] * 4), ckpt_path=caught.value.checkpoint)
    return ended, module.history


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_at_the_end_of_an_epoch_does_not_wait_for_the_next_one(tmp_path, world_size):
    updates = 4 // world_size
    for ended, history in ranks.run(world_size, end_of_epoch, tmp_path):
        assert ended == (signal.SIGTERM, updates, 1)
        assert history == [-float(update) for update in range(updates + 1, 3 * updates + 1)]


def saved_in(directory):
    return newest([directory]).path


def test_off_the_main_thread_no_handler_is_installed():
    found = []

    def work():
        module = scalar.Scalar()
        module.on_train_start = lambda: found.append(signal.getsignal(signal.SIGTERM))
        scalar.trainer().fit(module, scalar.loader([1.0]))

    thread = threading.Thread(target=work)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert found == [before]
