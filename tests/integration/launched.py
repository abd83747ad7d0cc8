"""Functions that test_launch.py runs in worker processes."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from trivet.errors import RankFailed
from trivet.launch.group import Group
from trivet.launch.signals import Stop


def work(parts, world, out_dir):
    parts["work"](world, out_dir)


def add(world, out_dir):
    (out_dir / f"pid-{world.rank}").write_text(str(os.getpid()))
    group = Group.open(world, "gloo")
    total = torch.ones(1) * (world.rank + 1)
    dist.all_reduce(total)
    posted = group.exchange("names", f"r{world.rank}") + group.exchange("names", f"s{world.rank}")
    group.close()
    if world.rank == 0:
        (out_dir / "result").write_text(f"{total.item():g} {' '.join(posted)} {world.source}")


class Boom(ValueError):
    def __init__(self, code):
        super().__init__(f"boom {code}")
        self.code = code

    def __reduce__(self):
        return (Boom, (self.code,))


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("cannot travel")
        self.lock = threading.Lock()


ENDS = {
    "raise": lambda: (_ for _ in ()).throw(Boom(7)),
    "unpicklable": lambda: (_ for _ in ()).throw(Unpicklable(1, 2)),
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def one_ends(world, out_dir, how):
    """Rank 1 ends as told, rank 0 meets that in a collective and cleans up as the training loop does."""
    (out_dir / f"pid-{world.rank}").write_text(str(os.getpid()))
    group = Group.open(world, "gloo")
    dist.all_reduce(torch.ones(1))
    try:
        if world.rank == 1:
            ENDS[how]()
        dist.all_reduce(torch.ones(1))
    except BaseException as error:
        failure = group.failure(wait_s=2.0) if world.rank == 0 else None
        group.fail(failure or error)
        (out_dir / f"cleanup-{world.rank}").write_text(str(failure))
        group.close(abort=True)
        if failure is not None:
            raise failure from error
        raise


def other_is_stuck(world, out_dir, where):
    """Rank 1 raises while rank 0 waits where no Python signal handler runs, or in Python."""
    (out_dir / f"pid-{world.rank}").write_text(str(os.getpid()))
    if world.rank == 1:
        while not (out_dir / "pid-0").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        raise Boom(8)
    if where == "group":
        Group.open(world, "gloo")
    try:
        time.sleep(100)
    except RankFailed as error:
        (out_dir / "cleanup-0").write_text(str(error))
        raise


def other_is_late(world, out_dir):
    """Rank 1 says that it fails and takes its time with that; rank 0 does not hear of it in Python."""
    (out_dir / f"pid-{world.rank}").write_text(str(os.getpid()))
    group = Group.open(world, "gloo")
    if world.rank == 1:
        group.fail(Boom(9))
    time.sleep(100)


def wait(world, out_dir):
    (out_dir / f"pid-{world.rank}").write_text(str(os.getpid()))
    time.sleep(100)


def ignore(world, out_dir):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait(world, out_dir)


def train(world, out_dir):
    """Updates with a collective each, until all ranks agree to stop."""
    group = Group.open(world, "gloo")
    with Stop(world) as stop:
        for update in range(1, 1_000_000):
            dist.all_reduce(torch.ones(1))
            if update == 10:
                (out_dir / f"pid-{world.rank}").write_text(str(os.getpid()))
            if stop.requested and stop.agree(update, group):
                (out_dir / f"stopped-{world.rank}").write_text(str(update))
                time.sleep(world.rank)  # a rank that saves longer must not be ended by one that is done
                (out_dir / f"saved-{world.rank}").touch()
                group.close()
                raise KeyboardInterrupt


def twice(world, out_dir):
    for _ in range(2):
        add(world, out_dir)


def post_alone(world, out_dir):
    group = Group.open(world, None)
    if world.rank == 0:
        group.exchange("lonely", "here", timeout_s=1.0)
    Path(out_dir, "done").touch()


def which_trivet(world, out_dir):
    (out_dir / "result").write_text(repr((world, sys.argv, os.getcwd())))
