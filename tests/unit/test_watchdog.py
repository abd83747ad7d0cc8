"""The thread that watches a rank: what it survives, and what it leaves as it was."""

import faulthandler
import json
import os
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore
from trivet.launch import watch, watchdog
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
