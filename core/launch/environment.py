"""Environment: a way in which somebody else starts the processes of a run, recognised by what it leaves for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from .world import World


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
