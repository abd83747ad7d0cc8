"""C11: one rank raises, and the whole job ends soon, with that rank's traceback first and once, and nothing is left."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import one_rank_fails
import pytest
import ranks
from trivet.errors import RankFailed

HERE = Path(__file__).parent
LIMIT_S = 10  # from the failure until the caller has its error
PLACES = ["training_step", "validation_step", "callback", "setup", "configure_optimizers", "__getitem__"]


def check_hooks(notes):
    """on_exception and teardown ran on both ranks, and rank 0 was told that it was rank 1."""
    first, second = ((notes / f"hooks-{rank}").read_text() for rank in range(2))
    assert re.fullmatch(r"on_exception RankFailed: rank 1 failed with ValueError: (.*\n)*.*boom\n+teardown\n", first)
    assert re.fullmatch(r"on_exception ValueError: (.*\n)*.*boom\n+teardown\n", second)


def check_ended(notes, ended):
    """It took less than 10 s, and none of the processes is left, data-loader workers included."""
    assert ended - float((notes / "failed-at").read_text()) < LIMIT_S
    mine = str(notes).encode()
    for _ in range(50):
        left = [process for process in Path("/proc").glob("[0-9]*") if int(process.name) != os.getpid()]
        left = [process.name for process in left if mine in environment(process)]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes are left: {left}")


def environment(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTES", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("place", ["training_step", "__getitem__"])
def test_in_a_launched_fit(notes, place):
    with pytest.raises(RankFailed, match=r"rank 1 failed with ValueError: (.|\n)*boom") as caught:
        one_rank_fails.fit(place, str(notes), devices=2)
    check_ended(notes, time.time())
    check_hooks(notes)
    assert (caught.value.rank, caught.value.type_name) == (1, "ValueError")
    assert isinstance(caught.value.__cause__, ValueError)
    assert 'raise ValueError("boom")' in caught.value.traceback


def run(arguments, notes, **variables):
    variables = os.environ | {"NOTES": str(notes), "OMP_NUM_THREADS": "1"} | variables
    process = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=HERE, env=variables, capture_output=True, text=True, timeout=120
    )
    return process, time.time()


def test_through_the_command_line(notes):
    arguments = "--accelerator cpu --devices 2 --max_epochs 2 --logger false --num_sanity_val_steps 0"
    arguments += " --enable_checkpointing false --enable_progress_bar false"
    process, ended = run(["trivet", "fit", "--model", "one_rank_fails.Failing", *arguments.split()], notes)
    check_ended(notes, ended)
    check_hooks(notes)
    assert process.returncode == 1
    assert process.stderr.count('raise ValueError("boom")') == 1
    assert process.stderr.startswith("Traceback")
    assert "rank 1 failed with ValueError: boom" in process.stderr.splitlines()[-1]


def test_under_torchrun_and_the_port_is_free_again(notes):
    port = ranks.free_port()
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", str(HERE / "one_rank_fails.py")]
    process, ended = run(torchrun, notes, PLACE="training_step")
    check_ended(notes, ended)
    check_hooks(notes)
    assert process.returncode != 0
    assert 'raise ValueError("boom")' in process.stderr
    process, _ = run(torchrun, notes, PLACE="nowhere")
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_raises(notes, place):
    first, second = ranks.outcomes(one_rank_fails.fit, place, str(notes))
    assert isinstance(second, ValueError)
    assert isinstance(first, RankFailed)
    assert first.rank == 1
    assert first.type_name == "ValueError"
    check_hooks(notes)
