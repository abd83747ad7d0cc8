"""Launcher: what starts the processes of a run where no environment did."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ..plan import Plan


class Launcher(ABC):
    """Starts workers and waits for them. Selected with ``--launcher NAME``; entry points: trivet.launchers.

    Arguments of the constructor are options of the launcher (``--launcher.NAME``). It is made in the process that
    called, and travels to the workers with the Trainer, so it must pickle.
    """

    interface: ClassVar[int] = 1

    @property
    def offers(self) -> frozenset[str]:
        """Capability names. ``"several_nodes"``: it starts processes on more machines than this one.
        ``"node_by_node"``: called on each machine, it starts that one's processes and connects them with the others.
        Where there are several, its ``launch`` is given two more keywords: ``node``, an `environment.Node`, and
        ``timeout``, in how many seconds all have to end when one is lost. The first process of each leaves the result.
        """
        return frozenset()

    @abstractmethod
    def launch(self, function: str, parts: Mapping[str, Any], plan: Plan, *, run_dir: Path) -> None:
        """Run ``function`` in ``plan.world_size`` new processes; return when all have ended.

        ``function`` is ``"package.module:name"`` and is called in each process as ``function(parts, world, out_dir)``.
        ``parts`` holds the user's objects, which pickle by cloudpickle (`launch.payload.dumps` names the one that does
        not). ``world`` has the launcher's name as its source, and an address unless ``MASTER_ADDR`` and ``MASTER_PORT``
        are set in the workers, and ``TRIVET_LAUNCH_DIR`` is set there to a private directory. What rank 0 leaves in
        ``out_dir`` has to be in ``run_dir``, an existing directory of the caller, when this returns.

        Raises LaunchError where workers cannot be started, RankFailed for the rank that failed first, once no process
        is left, and KeyboardInterrupt where the workers stopped on request. Called on the main thread or another.
        """
