"""Every error that Trivet raises on purpose. A message says what was found, what was expected and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .combination import Combination


class TrivetError(Exception):
    """The root of all errors raised by Trivet itself."""


class ConfigurationError(TrivetError, ValueError):
    """An argument, or a combination of arguments, that cannot work. Raised before any work is done."""


class DataError(ConfigurationError):
    """A loader or data set that cannot be shared out among ranks, or that broke its promise while being read."""


class PluginError(TrivetError):
    """A plugin that cannot be used. The subclasses say why."""


class PluginNotFound(PluginError, LookupError):
    """No entry point of that group has the name."""


class PluginConflict(PluginError):
    """Two distributions registered the same name; the message gives the qualified forms ``dist:name``."""


class PluginBroken(PluginError):
    """The entry point's module raised while it was imported, or its target does not exist."""


class PluginInvalid(PluginError):
    """The entry point names something that is not a plugin of that kind, or one with another interface number."""


@dataclass(frozen=True)
class Conflict:
    """One reason why a combination cannot work.

    ``parties`` are the sides as they introduce themselves (``strategy 'ddp' (trivet 0.1.0)``), ``reason`` one sentence,
    ``remedy`` the flags to use instead (a combination that was itself negotiated), or an empty string.
    """

    parties: tuple[str, ...]
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{' and '.join(self.parties)}: {self.reason}"
        return f"{text} Use instead: {self.remedy}" if self.remedy else text


class PlanError(ConfigurationError):
    """The requested combination was refused. ``conflicts`` holds every reason, not only the first.

    ``combination`` is what was judged; it does not travel to other processes.
    """

    def __init__(self, conflicts: tuple[Conflict, ...], combination: Combination | None = None) -> None:
        self.conflicts, self.combination = conflicts, combination
        lines = "\n".join(f"  - {conflict}" for conflict in conflicts)
        noun = "conflict" if len(conflicts) == 1 else "conflicts"
        super().__init__(f"this combination cannot run ({len(conflicts)} {noun}):\n{lines}")

    def __reduce__(self) -> tuple[type[PlanError], tuple[tuple[Conflict, ...]]]:
        return (PlanError, (self.conflicts,))


class PlanMismatch(TrivetError):
    """What happened in the first update differs from what the Plan says."""


class CheckpointError(TrivetError):
    """A checkpoint that cannot be written or read; the message holds path and reason."""


class LaunchError(TrivetError):
    """Workers could not be started, or an object could not be handed to them."""


class RankFailed(TrivetError):
    """A worker process failed; raised in the process that called ``fit``, and in the other ranks.

    Attributes: ``rank`` (global), ``type_name`` of the original error, ``traceback`` as the worker's text. The original
    exception is ``__cause__`` where it pickles.
    """

    def __init__(self, rank: int, type_name: str, message: str, traceback: str = "") -> None:
        self.rank, self.type_name, self.message, self.traceback = rank, type_name, message, traceback
        super().__init__(f"rank {rank} failed with {type_name}: {message}")

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str, str, str]]:
        return (RankFailed, (self.rank, self.type_name, self.message, self.traceback))


class CollectiveError(TrivetError):
    """Ranks do not call the same collectives: one that only some ranks call would wait for the others for ever."""


class Terminated(SystemExit):
    """A signal asked the run to end (SIGTERM, under SLURM also SIGUSR1), and all ranks ended after the same update.

    Not an error. Where nobody catches it, it ends the process without a traceback, with the exit code that shells give
    to the signal: 128 and its number, 143 for SIGTERM.

    Attributes: ``signal``, its number; ``update``, after how many updates; ``checkpoint``, the path of what was saved
    there, or ``""``.
    """

    def __init__(self, signal: int, update: int = 0, checkpoint: str = "") -> None:
        self.signal, self.update, self.checkpoint = signal, update, checkpoint
        super().__init__(128 + signal)

    def __reduce__(self) -> tuple[type[Terminated], tuple[int, int, str]]:
        return (Terminated, (self.signal, self.update, self.checkpoint))


STOPS = (KeyboardInterrupt, Terminated)
"""What is raised where all ranks agreed to stop."""
