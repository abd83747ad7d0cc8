"""What a supervisor starts next when a process was lost."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from trivet.errors import ConfigurationError, RankFailed
from trivet.supervise import Supervisor

KILLED = RankFailed(1, "SIGKILL", "the process was killed by signal 9")


class Fake:
    """A trainer whose strategy cannot be laid out over ``bad`` processes, and whose fits fail as told."""

    def __init__(self, *, bad: int = -1, **options: Any) -> None:
        self.bad, self.used = bad, None
        self.max_restarts, self.min_devices = options.get("max_restarts", 0), options.get("min_devices")
        self.loggers: list[Any] = []

    def use_devices(self, devices: Any, accumulate: int) -> None:
        self.used = devices, accumulate

    def resolve(self, module: Any, world: Any) -> Any:
        devices = self.used[0]
        count = devices if isinstance(devices, int) else len(devices)
        if count == self.bad:
            raise ConfigurationError("cannot be laid out")
        return resolved(count, accumulate=self.used[1])


def resolved(devices: int, *, accumulate: int | None = 1, offers: frozenset[str] = frozenset(), **plan: Any) -> Any:
    values = {"devices": devices, "world_size": devices, "accumulate": accumulate, "device_ids": None}
    facts = SimpleNamespace(**{"global_batch_size": None, **values, **plan})
    return SimpleNamespace(plan=facts, combination=SimpleNamespace(accelerator=SimpleNamespace(offers=offers)))


def attempts(first: Any, failures: list[RankFailed], manifest: Any = None, **options: Any) -> list[Any]:
    """The devices of each attempt, of which the first ones fail."""
    trainer = Fake(**options)
    found = None if manifest is None else SimpleNamespace(path="ck", manifest=manifest)
    record = SimpleNamespace(versions=[])
    beginning = SimpleNamespace(record=record, path=None, directory=None, newest=lambda trainer: found)
    started = []

    def start(job: Any, now: Any) -> None:
        started.append((now.plan.devices, now.plan.accumulate))
        if failures:
            raise failures.pop(0)

    from trivet.job import Job

    job = Job("fit", None)  # type: ignore[arg-type]
    Supervisor(trainer, job, beginning).run(first, start)  # type: ignore[arg-type]
    return [*started, trainer.used]


def stored(accumulate: int, world_size: int) -> dict[str, Any]:
    return {"plan": {"accumulate": accumulate, "world_size": world_size}, "progress": {"update": 3, "epoch": 1}}


def test_fewer_processes_share_the_batches_of_an_update() -> None:
    assert attempts(resolved(4), [KILLED], min_devices=1) == [(4, 1), (2, 2), (2, 2)]
    assert attempts(resolved(4, accumulate=3), [KILLED], min_devices=1) == [(4, 3), (3, 4), (3, 4)]
    assert attempts(resolved(4, accumulate=3), [KILLED], min_devices=1, bad=3)[1:] == [(2, 6), (2, 6)]


def test_the_checkpoint_or_the_loader_says_how_many_there_are() -> None:
    derived = {"accumulate": None, "global_batch_size": 24}
    assert attempts(resolved(4, **derived), [KILLED], min_devices=1)[-1] == (2, 2)  # what is sure to divide
    assert attempts(resolved(4, **derived), [KILLED], stored(3, 4), min_devices=1)[-1] == (3, 4)


def test_a_lost_device_is_left_out() -> None:
    listed = {"accumulate": 3, "offers": frozenset({"device_ids"})}
    assert attempts(resolved(4, **listed), [KILLED], min_devices=1)[-1] == ([0, 2, 3], 4)
    assert attempts(resolved(4, **listed, device_ids=(4, 5, 6, 7)), [KILLED], min_devices=1)[-1] == ([4, 6, 7], 4)


def test_restarts_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    raised = RankFailed(0, "ValueError", "boom", "Traceback ...")
    assert attempts(resolved(2), [raised, KILLED], max_restarts=2) == [(2, 1)] * 3 + [None]
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "Traceback ..."
    assert told[1] == (
        "trivet: attempt 1: rank 0 failed with ValueError: boom. Attempt 2: restart 1 of 2 with 2 processes, from the "
        "beginning: nothing is saved yet"
    )


@pytest.mark.parametrize(
    ("failure", "options", "note"),
    [
        (KILLED, {}, None),
        (KILLED, {"min_devices": 3}, "no number of processes from min_devices=3 to 3 can share the 4 batches"),
        (RankFailed(0, "ValueError", "boom", "Traceback ..."), {"min_devices": 2}, "this one raised an exception"),
    ],
)
def test_where_nothing_may_help_the_failure_is_raised(
    failure: RankFailed, options: dict[str, Any], note: str | None
) -> None:
    with pytest.raises(RankFailed) as caught:
        attempts(resolved(4), [copy.copy(failure)], **options)
    notes = getattr(caught.value, "__notes__", [])
    assert [note in text for text in notes if note] == ([True] if note else [])
    assert bool(notes) == bool(note)


def test_what_trivet_refused_it_would_refuse_again() -> None:
    refused = RankFailed(0, "ConfigurationError", "no", "Traceback ...")
    refused.__cause__ = ConfigurationError("no")
    with pytest.raises(RankFailed) as caught:
        attempts(resolved(2), [refused], max_restarts=5)
    assert caught.value.__cause__ is not None
    assert "would again" in caught.value.__notes__[0]
