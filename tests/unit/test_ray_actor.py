"""What the actor of a rank says of its worker; no Ray is needed for that. Its launcher: tests/launch/test_ray.py."""

import subprocess

import pytest
from trivet.launch import failures
from trivet.launch.ray_actor import Rank


@pytest.fixture
def actor():
    made = Rank(1)
    made.process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield made
    made.end()


def test_it_tells_what_its_watchdog_found_of_another_rank(actor):
    hang = failures.Failure(0, "Hang", "rank 0 does not answer", time=1.0)
    failures.write(actor.directory, hang)
    assert actor.news().failure == hang
    own = failures.Failure(1, "RankFailed", "ended 5 s after it", time=2.0, follows=True)
    failures.write(actor.directory, own)
    assert actor.news().failure == own


def test_it_does_not_repeat_what_it_was_told(actor):
    actor.tell(failures.Failure(0, "ValueError", "boom"), 0, False)
    assert actor.news().failure is None
