"""The supervisor: starts a fit again when one of its processes was lost, from the newest checkpoint, or with fewer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from . import resume
from .capabilities import Resolved
from .checkpoint.newest import Found
from .errors import ConfigurationError, RankFailed, TrivetError
from .launch import output

if TYPE_CHECKING:
    from .job import Job
    from .resume import Beginning
    from .trainer import Trainer

Start = Callable[["Job", Resolved], None]


class Supervisor:
    """Attempts of one fit.

    With ``max_restarts`` the same number of processes is started that many times again, whatever ended the attempt
    before, short of an error of Trivet's own. Then, with ``min_devices``, there are fewer, if a process was lost
    without an exception (killed, crashed) or with its device.
    """

    def __init__(self, trainer: Trainer, job: Job, beginning: Beginning) -> None:
        self.trainer, self.job, self.beginning = trainer, job, beginning
        self.attempt, self.restarts = 1, 0  # restarts with this number of processes

    def run(self, resolved: Resolved, start: Start) -> None:
        """Start, and start again as long as that may help. Raises what the last attempt raised."""
        while True:
            try:
                start(self.job, resolved)
                return
            except RankFailed as error:
                found = self.beginning.newest(self.trainer)
                try:
                    resolved, change = self._again(error, resolved, found)
                except TrivetError as no:
                    if str(no):
                        error.add_note(f"not started again: {no}")
                    raise error from error.__cause__
                self._prepare(found)
                self._log(error, change, found)

    def _again(self, error: RankFailed, resolved: Resolved, found: Found | None) -> tuple[Resolved, str]:
        """What to start next, and in words what is different. Raises a TrivetError where nothing may help."""
        if isinstance(error.__cause__, TrivetError):
            raise TrivetError("Trivet itself refused, and would again")
        limit = self.trainer.max_restarts
        if self.restarts < limit:
            self.restarts += 1
            return resolved, f"restart {self.restarts} of {limit} with {_count(resolved.plan.world_size)}"
        if self.trainer.min_devices is None:
            raise TrivetError(f"it was started {limit + 1} times (max_restarts={limit})" if limit else "")
        if error.traceback and error.type_name != "AcceleratorError":
            raise TrivetError("fewer processes are for those that are lost, and this one raised an exception")
        self.restarts = 0
        return self._fewer(error, resolved, found)

    def _fewer(self, error: RankFailed, resolved: Resolved, found: Found | None) -> tuple[Resolved, str]:
        trainer, plan = self.trainer, resolved.plan
        before, least = plan.devices, trainer.min_devices or 1
        batches = self._batches(resolved, found)
        passed = []
        for devices in range(before - 1, least - 1, -1):
            if batches % devices:
                passed.append(devices)
                continue
            ids = None
            if "device_ids" in resolved.combination.accelerator.offers:
                known = plan.device_ids or tuple(range(before))
                ids = [index for rank, index in enumerate(known) if rank != error.rank][:devices]
            trainer.use_devices(ids or devices, batches // devices)
            try:
                fewer = trainer.resolve(self.job.module, None)
            except ConfigurationError:
                passed.append(devices)
                continue
            change = f"with {_count(devices)} instead of {before}"
            if ids:
                change += f", on devices {', '.join(map(str, ids))}"
            if passed:
                change += f" ({' or '.join(map(str, passed))} cannot share the {batches} batches of an update)"
            return fewer, change
        trainer.use_devices(plan.device_ids or before, batches // before)
        raise TrivetError(
            f"no number of processes from min_devices={least} to {before - 1} can share the {batches} batches of an "
            "update evenly"
        )

    def _batches(self, resolved: Resolved, found: Found | None) -> int:
        """The user's batches in one update of all ranks: what has to stay. As far as it is known, else a divisor."""
        plan = resolved.plan
        if found is not None and (stored := found.manifest["plan"]).get("accumulate"):
            return int(stored["accumulate"]) * int(stored["world_size"])
        size = getattr(self.job.train_dataloaders, "batch_size", None)
        if plan.global_batch_size is not None and isinstance(size, int):
            return plan.global_batch_size // size
        return plan.world_size * (plan.accumulate or 1)

    def _prepare(self, found: Found | None) -> None:
        record = self.beginning.record
        assert record is not None
        self.attempt += 1
        path = str(found.path) if found is not None else self.beginning.path
        self.job = replace(self.job, ckpt_path=path)
        resume.go_on(self.trainer, record.versions, found)

    def _log(self, error: RankFailed, change: str, found: Found | None) -> None:
        if found is not None:
            at = found.manifest["progress"]
            where = f"from {found.path} ({at.get('epoch')} epochs, {at.get('update')} updates)"
        else:
            where = f"from {self.beginning.path}" if self.beginning.path else "from the beginning: nothing is saved yet"
        if error.traceback:
            print(error.traceback.rstrip(), file=sys.stderr)
        text = f"trivet: attempt {self.attempt - 1}: {error}. Attempt {self.attempt}: {change}, {where}"
        print(text, file=sys.stderr, flush=True)
        if self.beginning.directory is not None:
            output.supervised(self.beginning.directory, f"{error.traceback}{text}")


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"
