"""The Ray launcher: one actor per device in a placement group, on one machine or many."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from . import payload
from .failures import Failure
from .launcher import Launcher
from .local import KILL_S
from .ray_actor import Facts, News, Rank, variables
from .signals import Asking, judge, stopped_by

if TYPE_CHECKING:
    from ..plan import Plan

_SLICE_S = 0.2
_END_S = 3.0


class Ray(Launcher):
    """Processes on the machines of a Ray cluster. Needs the extra ``trivet[ray]``; uses nothing of Ray Train.

    Ray that is initialised already is used, as is the cluster at ``address`` (or ``RAY_ADDRESS``; ``"auto"`` finds the
    one of this machine). Otherwise Ray is started for the run, on this machine alone, and ended with it.

    Args:
        address: Of the cluster.
        cpus: CPUs that each process reserves.
        gpus: GPUs that each process reserves; by default one where the accelerator is CUDA.
        resources: Further resources of each process, such as ``{"accelerator_type:H100": 0.001}``.
        runtime_env: Ray's runtime environment of the processes (``working_dir``, ``pip``, ``env_vars``, ...).
        wait_s: How long to wait, in seconds, until the cluster has room for all processes.
    """

    def __init__(
        self,
        address: str | None = None,
        cpus: float = 1,
        gpus: float | None = None,
        resources: dict[str, float] | None = None,
        runtime_env: dict[str, Any] | None = None,
        wait_s: float = 300.0,
    ) -> None:
        self.address, self.cpus, self.gpus, self.wait_s = address, cpus, gpus, wait_s
        self.resources, self.runtime_env = dict(resources or {}), dict(runtime_env or {})

    @property
    def offers(self) -> frozenset[str]:
        return frozenset({"several_nodes"})

    def launch(self, function: str, parts: Mapping[str, Any], plan: Plan, *, run_dir: Path) -> None:
        if plan.device_ids is not None:
            raise LaunchError(
                f"devices {list(plan.device_ids)!r} were asked for, and Ray itself chooses which devices a process "
                f"gets. Say how many: --devices {plan.devices}."
            )
        data = payload.dumps(parts)
        settings = {
            "function": function,
            "source": "ray",
            "path": [str(entry) for entry in sys.path],
            "argv": sys.argv,
            "cwd": os.getcwd(),
        }
        with self._connected(plan), Asking() as asking:  # Ray takes SIGTERM when it is initialised: ours come after
            started = _Launch(self, plan, asking)
            try:
                started.start(data, settings)
                del data
                started.wait()
                if not started.found and not asking.again:
                    started.take(run_dir)
            finally:
                started.end()
            if asking.again:
                raise stopped_by(asking.number)
            judge(started.found, asking.number)

    @contextlib.contextmanager
    def _connected(self, plan: Plan) -> Iterator[None]:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read on import; else lines of ranks that are alike are left out
        try:
            import ray
        except ImportError as error:
            raise LaunchError("Ray is not installed here. Install trivet[ray], or use --launcher local.") from error
        if ray.is_initialized():
            yield
            return
        address = self.address or os.environ.get("RAY_ADDRESS")
        if address is None and plan.num_nodes > 1:
            raise LaunchError(
                f"{plan.num_nodes} machines were asked for, and no Ray cluster was named. Give its address "
                "(--launcher.address HOST:PORT, or auto on one of its machines), or set RAY_ADDRESS."
            )
        options: dict[str, Any] = {"address": address}
        if address is None:
            cpus = max(os.cpu_count() or 1, int(-(-self.cpus * plan.devices // 1)))
            options = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
            options["_node_ip_address"] = "127.0.0.1"
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(logging_level=logging.ERROR, **options)
            yield
        finally:
            ray.shutdown()
            if main and before is not None:
                signal.signal(signal.SIGTERM, before)


class _Launch:
    """One launch: the driver passes on between the actors what one of them says."""

    def __init__(self, launcher: Ray, plan: Plan, asking: Asking) -> None:
        self.launcher, self.plan, self.asking = launcher, plan, asking
        self.actors: list[Any] = []
        self.group: Any = None
        self.found: list[Failure] = []
        self.told = 0  # which signal the actors know of
        self.deadline = float("inf")

    # starting

    def start(self, data: bytes, settings: Mapping[str, Any]) -> None:
        import ray

        plan = self.plan
        self._place()
        try:
            facts: list[Facts] = ray.get([actor.facts.remote() for actor in self.actors])
            address = "127.0.0.1" if plan.num_nodes == 1 else facts[0].address
            port = ray.get(self.actors[0].serve.remote(address))
            handed, begun = ray.put(data), []
            for rank, actor in enumerate(self.actors):
                first = rank - rank % plan.devices
                gpus = [index for one in facts[first : first + plan.devices] for index in one.gpus]
                own = variables(rank, plan.devices, plan.num_nodes, address, port, gpus)
                begun.append(actor.start.remote(handed, settings, own, plan.comm_profile))
            ray.get(begun)
        except ray.exceptions.RayError as error:
            raise LaunchError(f"Ray could not start the workers: {error}") from error

    def _place(self) -> None:
        """Reserve a bundle on each machine for all of its processes, and make their actors."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        launcher, plan = self.launcher, self.plan
        gpus = launcher.gpus if launcher.gpus is not None else float(plan.device_type == "cuda")
        each = {"CPU": float(launcher.cpus), "GPU": float(gpus), **launcher.resources}
        bundle = {name: amount * plan.devices for name, amount in each.items() if amount}
        self.group = placement_group([bundle] * plan.num_nodes, strategy="STRICT_SPREAD")
        if not self.group.wait(launcher.wait_s):
            raise LaunchError(
                f"the Ray cluster has no room: within {launcher.wait_s:g} s it did not give {bundle!r} on each of "
                f"{plan.num_nodes} machines. It has {ray.cluster_resources()!r}, of which are free "
                f"{ray.available_resources()!r}. Ask for less (devices, num_nodes, cpus, gpus, resources), or wait "
                "longer (wait_s)."
            )
        actor_class = ray.remote(Rank)
        for rank in range(plan.world_size):
            actor = actor_class.options(
                num_cpus=launcher.cpus,
                num_gpus=gpus,
                resources=launcher.resources,
                runtime_env=launcher.runtime_env or None,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=rank // plan.devices
                ),
            ).remote(rank)
            self.actors.append(actor)

    # waiting

    def wait(self) -> None:
        """Until all have ended, somebody asked again, or the time is over that the first failure left the others."""
        import ray

        waiting = {actor.news.remote(): rank for rank, actor in enumerate(self.actors)}
        while waiting and not self.asking.again and time.monotonic() < self.deadline:
            for reference in ray.wait(list(waiting), timeout=_SLICE_S)[0]:
                rank = waiting.pop(reference)
                try:
                    news = ray.get(reference)
                except ray.exceptions.RayError as error:
                    news = News(_died(rank, error), ended=True)
                self._pass_on(news)
                if not news.ended:
                    waiting[self.actors[rank].news.remote()] = rank
            if self.asking.number and not self.told:
                self._tell(asked=self.asking.number, interrupt=True)

    def _pass_on(self, news: News) -> None:
        failure = news.failure
        if failure is not None and failure.rank not in [known.rank for known in self.found]:
            self.found.append(failure)
            if not failure.interrupt:
                self.deadline = min(self.deadline, time.monotonic() + KILL_S)
                self._tell(failure)
        if news.asked and not self.told:
            self._tell(asked=news.asked)

    def _tell(self, failure: Failure | None = None, *, asked: int = 0, interrupt: bool = False) -> None:
        self.told = self.told or asked
        for actor in self.actors:
            actor.tell.remote(failure, asked, interrupt)

    # ending

    def take(self, run_dir: Path) -> None:
        """Copy what rank 0 left, which may be on another machine."""
        import ray

        actor = self.actors[0]
        for name in ray.get(actor.left.remote()):
            with open(run_dir / name, "wb") as file:
                while part := ray.get(actor.read.remote(name, file.tell())):
                    file.write(part)

    def end(self) -> None:
        """End all workers, actors and the placement group, whatever state they are in."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self.actors:
            ray.wait([actor.end.remote() for actor in self.actors], num_returns=len(self.actors), timeout=_END_S)
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)


def _died(rank: int, error: Exception) -> Failure:
    """The record of a rank whose actor is no more; Ray knows no exit code, and says the same of all reasons."""
    said = str(error).strip().splitlines()[-1].partition(" Some common causes")[0]
    text = f"its Ray actor is gone (killed, out of memory, or with its machine): {said}"
    return Failure(rank, type(error).__name__, text, time=time.time())
