"""A run that is killed again and again, wherever it is, ends with the bits of one that nobody touched."""

import random
import time
from pathlib import Path

import pytest
import torch
from forked import Server
from full import FULL
from trivet.checkpoint import directory
from trivet.checkpoint.newest import newest

KILLS, UPDATES = (30, 48) if FULL else (6, 24)
FLAGS = (
    "fit", "--resume", "auto", "--strategy", "fsdp", "--accelerator", "cpu", "--max_steps", str(UPDATES),
    "--enable_progress_bar", "false", "--log_every_n_steps", "1", "--callbacks", "Checkpoint",
    "--callbacks.every_n_updates", "1", "--callbacks.save_top_k", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """The run that nobody kills; where its checkpoints are written behind the training, its bits are the same."""
    root = tmp_path_factory.mktemp("whole")
    assert run(server, root, ()) is None, (root / "log").read_text()
    return root


def run(server, root, flags, until=None, delay=0.0, *, saving=False):
    """Start the command; kill it when ``until`` updates are saved and ``delay`` has passed, if it lives so long.

    With ``saving`` the delay begins with the next save."""
    place, log = root / "version_0" / "checkpoints", root / "log"
    ranks = server.start(*FLAGS, *flags, "--default_root_dir", str(root), log=log, TRIVET_TEST_SLOW_MS="4")
    limit = time.monotonic() + 60
    while ranks.alive:
        assert time.monotonic() < limit, log.read_text()
        if until is not None and saved(place) >= until and (not saving or list(place.glob(".*"))):
            time.sleep(delay)
            ranks.kill()
            return [path.name for path in place.glob(".*")] if place.exists() else []
        time.sleep(0.002)
    return None


def saved(place):
    """The newest update that a complete checkpoint in this directory has, by its name."""
    names = [path.name for path in place.iterdir() if path.name[0] != "."] if place.exists() else []
    return max((int(name.partition("update=")[2].partition("-")[0]) for name in names), default=0)


def state_of(root):
    found = newest([root / "version_0" / "checkpoints"])
    assert found is not None
    return directory.read(found.path)


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_bits(server, whole, tmp_path, save_async):
    flags = ("--callbacks.save_async", "true") if save_async else ()
    kills = KILLS if not save_async or FULL else KILLS // 2
    killed = tmp_path / "killed"
    killed.mkdir()
    chance = random.Random(7)
    within = count = 0
    for number in range(kills):
        # spread over the run, some of them before its first save
        until = 0 if number % 5 == 0 else number * (UPDATES - 2) // kills
        saving = number % 2 == 1  # every second one, to be sure of some
        delay = chance.uniform(0, 0.02 if saving else 0.25 if until else 0.5)
        left = run(server, killed, flags, until, delay, saving=saving)
        if left is None:
            break
        count += 1
        within += bool(left)
    while run(server, killed, flags) is not None:
        pass
    print(f"{count} kills, {within} of them within a save; {30 - kills} of 30 left out without TRIVET_CI_FULL=1")
    assert count == kills
    assert within > 0, "no kill fell into a save"
    log = (killed / "log").read_text()
    assert "Traceback" not in log, log
    one, other = state_of(whole), state_of(killed)
    assert one.progress["update"] == other.progress["update"] == UPDATES
    assert one.module.keys() == other.module.keys()
    for name, tensor in one.module.items():
        assert torch.equal(tensor, other.module[name]), name
    for parameter, values in one.optimizers[0]["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.optimizers[0]["state"][parameter][key]))
    assert (whole / "version_0" / "metrics.csv").read_text() == (killed / "version_0" / "metrics.csv").read_text()
    assert [path.name for path in killed.iterdir() if path.is_dir()] == ["version_0"]
    assert len(list(Path(killed, "version_0", "checkpoints").iterdir())) == 2  # save_top_k, and no rubbish
