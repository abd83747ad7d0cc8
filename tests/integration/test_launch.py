"""The local launcher, the group and signals, on plain functions in real processes."""

import functools
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import launched
import pytest
import torch
from trivet.errors import LaunchError, RankFailed
from trivet.launch.failures import RemoteTraceback
from trivet.launch.group import Group
from trivet.launch.local import launch
from trivet.launch.signals import Stop
from trivet.launch.world import World


def run(work, out_dir, world_size=2):
    launch("launched:work", {"work": work}, world_size, run_dir=out_dir)


def pids(directory, count=2):
    """The worker processes' ids, once all are there."""
    limit = time.monotonic() + 60
    files = [directory / f"pid-{rank}" for rank in range(count)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < limit, "the workers did not start"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def gone(ids, seconds):
    """Whether all these processes end within the time."""
    limit = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in ids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(autouse=True)
def _private_directories(tmp_path_factory, monkeypatch):
    """Every launch removes what it wrote into the temporary directory, whatever happens."""
    directory = tmp_path_factory.mktemp("private")
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    yield
    assert list(directory.glob("trivet-*")) == []


def test_ranks_are_connected_and_leave_a_result(tmp_path):
    run(launched.add, tmp_path)
    assert (tmp_path / "result").read_text() == "3 r0 r1 s0 s1 local"
    assert gone(pids(tmp_path), 0)


def test_two_groups_in_one_process(tmp_path):
    run(launched.twice, tmp_path)
    assert (tmp_path / "result").read_text() == "3 r0 r1 s0 s1 local"


def test_two_launches_at_the_same_time(tmp_path):
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    threads = [threading.Thread(target=run, args=(launched.add, directory)) for directory in directories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(directory / "result").read_text() for directory in directories] == ["3 r0 r1 s0 s1 local"] * 2


def test_workers_have_the_callers_directory_and_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    run(launched.which_trivet, tmp_path, world_size=1)
    assert f"['program', '--flag'], {str(tmp_path)!r}" in (tmp_path / "result").read_text()


# failure


@pytest.mark.parametrize(
    ("how", "type_name", "message", "cause"),
    [
        ("raise", "Boom", "boom 7", launched.Boom),
        ("unpicklable", "Unpicklable", "cannot travel", RemoteTraceback),
        ("sys.exit", "SystemExit", "3", SystemExit),
        ("os._exit", "exit code 3", "without an exception", type(None)),
        ("os._exit(0)", "exit code 0", "without an exception", type(None)),
        ("SIGKILL", "SIGKILL", "killed by signal 9", type(None)),
    ],
)
def test_the_first_failing_rank_is_named(tmp_path, capfd, how, type_name, message, cause):
    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run(functools.partial(launched.one_ends, how=how), tmp_path)
    assert time.monotonic() - start < 40  # what is asked for is 10 s from the failure on; starting takes the rest
    error = caught.value
    assert (error.rank, error.type_name) == (1, type_name)
    assert message in error.message
    assert type(error.__cause__) is cause
    if error.traceback:
        assert error.traceback.splitlines()[1].endswith("in one_ends")  # begins with the user's frames
    assert (tmp_path / "cleanup-0").read_text().startswith("rank 1 failed with ")
    assert gone(pids(tmp_path), 0)
    captured = capfd.readouterr()
    assert "boom" not in captured.out + captured.err  # the caller shows the traceback, nobody before


def test_the_traceback_is_shown_first_and_once(tmp_path):
    import traceback

    with pytest.raises(RankFailed) as caught:
        run(functools.partial(launched.one_ends, how="raise"), tmp_path)
    text = "".join(traceback.format_exception(caught.value))
    assert text.index("in one_ends") < text.index("rank 1 failed with Boom")
    assert text.count("in one_ends") == 1
    assert caught.value.__cause__.code == 7


@pytest.mark.parametrize("where", ["python", "group"])
def test_a_rank_that_is_stuck_ends_soon_after_another_failed(tmp_path, where):
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 failed with Boom: boom 8"):
        run(functools.partial(launched.other_is_stuck, where=where), tmp_path)
    assert time.monotonic() - start < 40
    assert gone(pids(tmp_path), 0)
    if where == "python":
        assert (tmp_path / "cleanup-0").read_text() == "rank 1 failed with Boom: boom 8"


def test_a_failed_launch_leaves_room_for_the_next(tmp_path):
    with pytest.raises(RankFailed):
        run(functools.partial(launched.one_ends, how="raise"), tmp_path)
    run(launched.add, tmp_path)
    assert (tmp_path / "result").exists()


def test_exchange_names_the_ranks_that_did_not_post(tmp_path):
    with pytest.raises(RankFailed, match="'lonely' from every rank; nothing came from rank 1") as caught:
        run(launched.post_alone, tmp_path)
    assert isinstance(caught.value.__cause__, LaunchError)


# what is handed over


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def closure():
    lock = threading.Lock()
    return lambda: lock


def layers(**attributes):
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    vars(net[1]).update(attributes)
    return Holder(net=net)


def looped():
    holder = Holder(lock=threading.Lock())
    holder.items = [holder]
    return holder


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        (
            lambda: {"trainer": Holder(callbacks=[Holder(lock=threading.Lock())])},
            r"trainer\.callbacks\[0\]\.lock \(a _thread\.lock\)",
        ),
        (lambda: {"a": 1, "module": layers(stream=(i for i in []))}, r"module\.net\[1\]\.stream \(a generator\)"),
        (
            lambda: {"data": {"train": [1, Holder(x=(2, threading.Lock()))]}},
            r"data\['train'\]\[1\]\.x\[1\] \(a _thread\.lock\)",
        ),
        (lambda: {"data": Holder(f=closure())}, r"data\.f -> lock \(a _thread\.lock\)"),
        (
            lambda: {"data": Holder(f=functools.partial(print, threading.Lock()))},
            r"data\.f\.args\[0\] \(a _thread\.lock\)",
        ),
        (lambda: {"data": looped()}, r"data\.lock \(a _thread\.lock\)"),
    ],
)
def test_what_cannot_be_handed_over_is_named(tmp_path, parts, path):
    with pytest.raises(LaunchError, match=rf"^{path} cannot be handed to worker processes: .*Make it in setup\(\)"):
        launch("launched:work", parts(), 2, run_dir=tmp_path)


SCRIPT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {here!r})
from trivet.launch.local import launch
class Work:
    def __init__(self, work): self.work = work
    def __call__(self, world, out_dir): self.work(world, out_dir)

import launched
launch("launched:work", {{"work": Work(launched.{name})}}, 2, run_dir=Path({out!r}))
print("ended well")
"""


PYTEST_FILE = """
from pathlib import Path
import launched
from trivet.launch.local import launch

class Work:
    def __call__(self, world, out_dir):
        launched.add(world, out_dir)

def test_launch():
    launch("launched:work", {{"work": Work()}}, 2, run_dir=Path({out!r}))
"""


def script(name, out):
    return SCRIPT.format(here=str(Path(__file__).parent), name=name, out=str(out))


def interpreter(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.Popen([sys.executable, *arguments], **options)


def test_a_script_without_main_guard(tmp_path):
    (tmp_path / "train.py").write_text(script("add", tmp_path))
    output, _ = interpreter(str(tmp_path / "train.py")).communicate(timeout=60)
    assert output == "ended well\n"
    assert (tmp_path / "result").read_text() == "3 r0 r1 s0 s1 local"


def test_a_scripts_error_is_shown_with_its_source_first_and_once(tmp_path):
    text = script("add", tmp_path).replace("self.work(world, out_dir)", "self.work.nothing()")
    (tmp_path / "train.py").write_text(text)
    process = interpreter(str(tmp_path / "train.py"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.count("self.work.nothing()") == 1
    assert output.index('train.py", line 9, in __call__') < output.index("in <module>")
    assert "failed with AttributeError" in output.splitlines()[-1]


def test_python_c(tmp_path):
    output, _ = interpreter("-c", script("add", tmp_path)).communicate(timeout=60)
    assert output == "ended well\n"


def test_a_file_that_runpy_runs_under_another_name(tmp_path):
    (tmp_path / "train.py").write_text(script("add", tmp_path))
    code = f"import runpy; runpy.run_path({str(tmp_path / 'train.py')!r}, run_name='somebody')"
    output, _ = interpreter("-c", code).communicate(timeout=60)
    assert output == "ended well\n"


def test_a_test_file_that_pytest_imported_under_a_name_of_its_own(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "test_inner.py").write_text(PYTEST_FILE.format(out=str(tmp_path)))
    process = interpreter(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "inner",
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    output, _ = process.communicate(timeout=90)
    assert "1 passed" in output
    assert (tmp_path / "result").exists()


def test_an_interactive_session(tmp_path):
    controller, terminal = pty.openpty()
    process = interpreter("-i", "-q", stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.write(controller, script("add", tmp_path).replace('print("ended well")', "exit()").encode())
    try:
        process.wait(timeout=60)
    finally:
        os.close(controller)
    assert (tmp_path / "result").read_text() == "3 r0 r1 s0 s1 local"


# signals


def started(name, tmp_path):
    process = interpreter("-c", script(name, tmp_path))
    return process, pids(tmp_path)


def test_one_interrupt_stops_all_ranks_after_the_same_update(tmp_path):
    process, workers = started("train", tmp_path)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output.rstrip().endswith("KeyboardInterrupt")
    assert (tmp_path / "stopped-0").read_text() == (tmp_path / "stopped-1").read_text()
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
    assert gone(workers, 0)


def test_an_interrupt_ends_functions_that_do_not_know_of_it(tmp_path):
    process, workers = started("wait", tmp_path)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output.rstrip().endswith("KeyboardInterrupt")
    assert gone(workers, 0)


def test_a_second_interrupt_ends_at_once(tmp_path):
    process, workers = started("ignore", tmp_path)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output.rstrip().endswith("KeyboardInterrupt")
    assert gone(workers, 0)


def test_termination_stops_the_ranks_and_ends_with_its_exit_code(tmp_path):
    process, workers = started("train", tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "stopped-0").read_text() == (tmp_path / "stopped-1").read_text()
    assert gone(workers, 0)


@pytest.mark.parametrize("name", ["train", "ignore"])
def test_no_worker_outlives_a_killed_parent(tmp_path, name):
    process, workers = started(name, tmp_path)
    process.kill()
    process.communicate(timeout=60)
    assert gone(workers, 10)


def test_in_a_single_process_the_second_interrupt_raises():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        with Stop(World()) as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
            assert stop.agree(1, Group.open(World(), None))
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# torchrun

TORCHRUN = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import launched
from trivet.launch.environments import detect
launched.{call}(detect(), Path({out!r}))
"""


def torchrun_script(call, tmp_path):
    text = TORCHRUN.format(here=str(Path(__file__).parent), call=call, out=str(tmp_path))
    (tmp_path / "train.py").write_text(text)
    return str(tmp_path / "train.py")


def torchrun(call, tmp_path):
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    return interpreter(*command, "--local-addr=127.0.0.1", torchrun_script(call, tmp_path))


def test_torchrun_connects_the_ranks_twice(tmp_path):
    output, _ = torchrun("twice", tmp_path).communicate(timeout=60)
    assert (tmp_path / "result").read_text() == "3 r0 r1 s0 s1 torchrun", output


def test_under_torchrun_a_stuck_rank_ends_soon_after_another_failed(tmp_path):
    process = torchrun("other_is_late", tmp_path)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "rank 0 ends 5 s after rank 1 failed with Boom: boom 9" in output
    assert gone(pids(tmp_path), 0)


def test_under_torchrun_termination_stops_all_ranks_after_the_same_update(tmp_path):
    process = torchrun("train", tmp_path)
    workers = pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (tmp_path / "stopped-0").read_text() == (tmp_path / "stopped-1").read_text()
    assert gone(workers, 0)


def test_variables_set_by_hand_are_enough(tmp_path):
    script = torchrun_script("twice", tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    processes = [interpreter(script, env=os.environ | variables) for variables in ranks]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert (tmp_path / "result").read_text() == "3 r0 r1 s0 s1 torchrun", outputs
