"""Environment: a way in which somebody else starts the processes of a run, recognised by what it leaves for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .world import World


@dataclass(frozen=True)
class Node:
    """Which machine this is, among which: told by launchers that start one process on each and leave the rest to it.

    ``address`` is the ``host:port`` where the machines meet; ``devices`` the number of processes that this one has room
    for, where that was said. ``source`` is set by the caller, as that of a `World`.
    """

    rank: int
    num_nodes: int
    address: str
    devices: int | None = None
    source: str = ""

    @property
    def endpoint(self) -> tuple[str, int]:
        """``address`` in two."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


class Environment(ABC):
    """Recognises one kind of launcher outside of Trivet and reads the world from it. Entry points: trivet.environments.

    Every installed environment is asked, in every process that makes a Trainer or a Runtime, before anything else. So
    the module of one imports neither torch nor the launcher's own package; its constructor takes no arguments; and its
    methods are pure in ``environ``: they read no files and connect to nobody.
    """

    interface: ClassVar[int] = 1

    @abstractmethod
    def detect(self, environ: Mapping[str, str]) -> World | None:
        """The world that was announced to this process, or None where this launcher did not start it.

        ``World.source`` is set to the environment's name by the caller. ``World.address`` is where rank 0 is to be
        reached, if ``MASTER_ADDR`` and ``MASTER_PORT`` do not say it. What marks a cluster but no started process (an
        interactive session, an address alone) is None. So is another launcher inside this one, such as torchrun started
        by srun: the inner one says which process this is. Raises ConfigurationError where the variables contradict one
        another or some of them are missing.
        """

    @abstractmethod
    def reasons(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """What was found and what was missing: short clauses such as ``"RANK=3 is set"``, for messages."""

    def node(self, environ: Mapping[str, str]) -> Node | None:
        """Which machine this is, where the launcher starts one process on each machine that starts the others there.

        By default None: the launcher starts every process, or none. Not asked for where `detect` gave a world.
        """
        return None

    def hint(self, environ: Mapping[str, str]) -> str:
        """What to tell the user of a single process that may have been meant as one of several; by default nothing.

        Asked for where there is neither a world nor a node. A clause such as ``"the job has room for 4 tasks"``.
        """
        return ""
