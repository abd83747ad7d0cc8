"""The thread that watches a rank: what it survives, and what it leaves as it was."""

import faulthandler
import io
import json
import os
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore
from trivet.errors import RankFailed
from trivet.launch import failures, local, output, watch, watchdog, worker
from trivet.launch.environment import Node
from trivet.launch.group import Group
from trivet.launch.watchdog import Watchdog
from trivet.launch.world import World


@pytest.fixture
def faults():
    """Without pytest's own use of faulthandler, which this one leaves alone."""
    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if enabled:
        faulthandler.enable()


def watching(pulse, **options):
    return Watchdog(World(), None, pulse=pulse, progress=lambda: "step 1", timeout=60.0, **options).start()


def test_notes_on_a_full_disk_do_not_end_the_watch(faults):
    looks = []
    full = os.open("/dev/full", os.O_RDWR)
    try:
        found = watching(lambda: (looks.append(1),), notes=full)
        time.sleep(3 * watchdog._PERIOD_S)
        assert found._thread.is_alive()
        found.stop()
    finally:
        os.close(full)
    assert len(looks) >= 2
    assert not faulthandler.is_enabled()


def test_a_full_disk_loses_no_verdict(faults, tmp_path):
    store, missing = HashStore(), tmp_path / "missing"
    guard = watch.Watch(lambda: None, last_words=print, asked=lambda: 0, ask=print, directory=tmp_path)
    store.set("watchdog/asked", "7")
    store.set("watchdog/verdict", json.dumps([{"rank": 1, "kind": "Hang", "text": "stuck"}, 0]))
    found = Watchdog(World(world_size=2), store, pulse=lambda: (1,), progress=lambda: "step 1", timeout=60.0)
    found.log, guard.directory = Path("/dev/full"), missing
    watch.set_current(guard)
    try:
        found.start()._thread.join(10)
    finally:
        watch.set_current(None)
        found.stop()
    assert store.check(["watchdog/place/7/0", "failed"])
    assert json.loads(store.get("failed"))[:3] == [1, "Hang", "stuck"]


def test_a_watch_that_was_stopped_sets_no_timer(faults):
    found = watching(lambda: ("same",))
    found.stop()
    found._arm()  # as a thread does that a call of the store held up for longer than `stop` waits
    assert found._dump is None


def test_a_full_disk_does_not_end_what_watches_the_other_ranks(monkeypatch):
    def full(*arguments):
        did.append(arguments)
        raise OSError(28, "No space left on device")

    did, ended, failure = [], [], RankFailed(1, "ValueError", "boom", "")
    monkeypatch.setattr(watch, "_PERIOD_S", 0.01)
    monkeypatch.setattr(watch, "GRACE_S", 0.0)
    looks = iter([None, None, failure])
    guard = watch.Watch(lambda: next(looks), last_words=full, asked=lambda: 0, ask=full)
    monkeypatch.setattr("os._exit", lambda code: ended.append(code) or guard._stopped.set())
    guard.stop_request = type("Stop", (), {"requested": 15})()
    guard.start()._thread.join(10)
    assert did == [(15,), (15,), (failure,)]
    assert ended == [1]


def test_a_full_disk_hides_no_failure(tmp_path, capfd, monkeypatch):
    error, missing = ValueError("boom"), tmp_path / "missing"
    guard = watch.Watch(lambda: None, last_words=print, asked=lambda: 0, ask=print, directory=missing)
    group = Group(World(world_size=2), HashStore(), None)
    monkeypatch.setattr(watch, "_current", guard)
    group.fail(error)
    assert json.loads(group.store.get("failed"))[:3] == [0, "ValueError", "boom"]
    code = worker._leave_word(missing, 0, error)
    assert "ValueError: boom" in capfd.readouterr().err
    assert "has the traceback" in failures.without_words(0, code, 0.0, follows=False, directory=missing).message
    monkeypatch.setattr(failures, "write", lambda *arguments: (missing / "record").write_text(""))
    assert worker._leave_word(tmp_path, 0, KeyboardInterrupt()) == 0
    assert (tmp_path / "done-0").exists()


def test_a_full_disk_keeps_no_launcher_from_asking_and_telling(tmp_path, monkeypatch):
    launch = local._Launch(tmp_path / "missing", 1, Node(0, 2, "127.0.0.1:0"), 1.0, None)
    launch._ask_to_stop(15)
    asked = []
    news = type("News", (), {"failed": RankFailed(1, "ValueError", "boom", ""), "asked": 0, "ask": asked.append})()
    launch._pass_on(news, silent=False)
    assert asked == [15]
    assert launch._something_failed()
    with pytest.raises(RankFailed, match="boom"):
        launch._judge()
    monkeypatch.setattr(Path, "write_text", lambda *arguments: os.write(os.open("/dev/full", os.O_WRONLY), b" "))
    failures.ask_to_stop(tmp_path, 15)
    failures.ask_to_stop(tmp_path, 2)
    assert failures.asked_to_stop(tmp_path) == 15


def test_prints_go_on_where_the_log_has_no_room(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    found = output.Output(World(), None, tmp_path)
    os.dup2(full := os.open("/dev/full", os.O_WRONLY), found._file.fileno())
    os.close(full)
    print("a line", flush=True)
    found.note(ValueError("boom"))
    found.close(failed=True)
    print("another")
    assert terminal.getvalue() == "a line\nanother\n"
    (tmp_path / "file").touch()
    output.supervised(tmp_path / "file", "a next attempt")


def test_without_a_log_the_timer_is_set_all_the_same(faults, tmp_path):
    found = Watchdog(World(), None, pulse=lambda: (1,), progress=lambda: "step 1", timeout=60.0)
    found.log = tmp_path / "missing" / "rank_0.log"
    found._arm()
    assert found._dump is not None
    found._disarm()


def test_a_watch_that_cannot_go_on_leaves_no_timer_that_ends_the_run(faults, monkeypatch):
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    looks = iter([("first",)])
    found = watching(lambda: next(looks))  # then StopIteration
    found._thread.join(10)
    assert not found._thread.is_alive()
    assert found._dump is None
    found.stop()


def test_a_run_that_has_failed_may_take_its_time(faults):
    found = watching(lambda: ("same",))
    time.sleep(2 * watchdog._PERIOD_S)
    assert found._dump is not None
    found.off = True
    time.sleep(2 * watchdog._PERIOD_S)
    assert found._dump is None
    found.stop()


def test_workers_notes_are_closed(faults, tmp_path):
    guard = watch.Watch(lambda: None, last_words=print, asked=lambda: 0, ask=print, directory=tmp_path)
    watch.set_current(guard)
    try:
        found = watching(lambda: ("same",))
        notes = found._notes
        time.sleep(2 * watchdog._PERIOD_S)
        found.stop()
    finally:
        watch.set_current(None)
        faulthandler.disable()
    assert (tmp_path / "place-0").read_text()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(notes)
