"""Which other rank failed, where nobody but the ranks themselves looks after them."""

import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
from torch.distributed import TCPStore
from trivet.launch import failures, local
from trivet.launch.environment import Node
from trivet.launch.peers import Peers
from trivet.launch.ray_actor import Rank


@pytest.fixture
def peers():
    found = Peers(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 2)
    yield found
    found.close()


def other(peers, tmp_path, pid, machine=None):
    """Rank 1, as it announces itself."""
    own = peers.store.get("process/0").decode().split(" ")
    (tmp_path / "notes").write_text(f"{time.time() - 2} rank 1 is at net.py:3")
    peers.store.set("process/1", f"{pid} {machine or own[1]} {tmp_path / 'notes'}")


@pytest.fixture
def ended():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_rank_whose_process_is_gone_is_named_with_where_it_was(peers, tmp_path, ended):
    assert peers.look() is None
    other(peers, tmp_path, ended)
    found = peers.look()
    assert (found.rank, found.type_name) == (1, "an early end")
    assert found.message.endswith(" s before, rank 1 is at net.py:3")


def test_what_it_told_before_counts(peers, tmp_path, ended):
    other(peers, tmp_path, ended)
    peers.store.set("failed", '[1, "ValueError", "boom", "its traceback"]')
    found = peers.look()
    assert (found.type_name, found.message, found.traceback) == ("ValueError", "boom", "its traceback")
    peers.forget()
    assert not (tmp_path / "notes").exists()  # of a rank that was ended by force


@pytest.mark.parametrize("how", ["runs", "done", "elsewhere"])
def test_others_are_not(peers, tmp_path, ended, how):
    other(peers, tmp_path, os.getpid() if how == "runs" else ended, "another" if how == "elsewhere" else None)
    if how == "done":  # it has ended as it should, perhaps because all stop on request
        peers.store.set("done/1", "")
    assert peers.look() is None


@pytest.fixture
def stopped():
    """A process that heeds SIGKILL alone."""
    process = subprocess.Popen(["sleep", "60"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process
    process.kill()
    process.wait()


def test_a_stopped_rank_is_killed_when_the_run_has_failed(peers, tmp_path, stopped):
    other(peers, tmp_path, stopped.pid)
    assert peers.look() is None
    assert stopped.poll() is None, "the run has not failed"
    peers.store.set("failed", '[1, "Hang", "does not answer", ""]')
    assert peers.look().rank == 1
    assert stopped.wait(10) == -signal.SIGKILL


def test_rays_actor_kills_it_too(stopped):
    rank = Rank(1)
    rank.process = stopped
    shutil.rmtree(rank.directory)  # there is no more room for records than on a full disk
    rank.tell(failures.Failure(1, "Hang", "does not answer"), 15, False)
    assert stopped.wait(10) == -signal.SIGKILL
    rank.end()


def test_the_local_launcher_kills_it_before_its_time_is_up(tmp_path, stopped, monkeypatch):
    def killed(launch):
        raise AssertionError("only with all others")

    monkeypatch.setattr(local, "KILL_S", 1.0)
    monkeypatch.setattr(local._Launch, "_kill", killed)
    (tmp_path / "pid-1").write_text(str(stopped.pid))
    failures.write(tmp_path, failures.Failure(1, "Hang", "does not answer"))
    launch = local._Launch(tmp_path, 2, Node(0, 1, "127.0.0.1:0"), 1.0, None)
    agent = threading.Thread(target=stopped.wait)
    agent.start()
    launch._wait(agent)
    assert launch.killed == {1}


def test_nothing_is_left(tmp_path):
    peers = Peers(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 1)
    path = peers.store.get("process/0").decode().split(" ", 2)[2]
    assert os.stat(path).st_mode & 0o077 == 0
    peers.close()
    assert not os.path.exists(path)


def test_without_room_for_notes_it_watches_all_the_same(monkeypatch, ended):
    def full(**options):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.mkstemp", full)
    peers = Peers(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 0, 2)
    _, host, notes = peers.store.get("process/0").decode().split(" ", 2)
    peers.store.set("process/1", f"{ended} {host} {notes}")
    assert peers.look().message.endswith("crash)")
    peers.close()
    assert os.path.exists(os.devnull)
