"""The directory of a run: what it notes there of itself, so that the same command finds it again."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import capture
from .errors import CheckpointError, ConfigurationError
from .processes import is_running

try:
    import fcntl
except ImportError:  # Windows: two runs in one directory are then not noticed
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from .module import Module
    from .trainer import Trainer

NAME = "run.json"
WHAT = ("model", "data", "optimizer", "lr_scheduler", "seed")
"""Keys of a command that say what is trained on what. The others say how long, where and how fast."""

_fits = itertools.count()


@dataclass
class Record:
    """What ``run.json`` holds.

    ``job``: what is trained, by which a command recognises its earlier runs. ``began``: when, in seconds.
    ``versions``: of the loggers. ``supervisor``: who starts its processes again, where somebody does; ``process``,
    ``host`` and ``fit``: which process of it, where, and the how manieth fit in there. ``ended``: with which limits and
    where it ended.
    """

    job: dict[str, Any]
    began: float = field(default_factory=time.time)
    versions: list[int | str | None] = field(default_factory=list)
    supervisor: str = ""
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    fit: int = 0
    ended: dict[str, Any] | None = None

    def write(self, directory: Path) -> None:
        """Replace ``run.json`` as a whole. Raises CheckpointError with path and reason."""
        temporary = directory / f".{NAME}.{os.getpid()}"
        with written(directory):
            with open(temporary, "w") as file:
                json.dump(asdict(self), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(directory / NAME)


@contextmanager
def written(directory: Path) -> Iterator[None]:
    """Make the directory of a run and write into it; an OSError becomes a CheckpointError with path and reason."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CheckpointError(
            f"the directory of this run, {str(directory)!r}, cannot be written: {type(error).__name__}: {error}. "
            "Give a default_root_dir (or a dirpath of the Checkpoint callback) that can be."
        ) from error


def read(directory: Path) -> Record | None:
    """What a run noted in this directory, None where none did."""
    try:
        values = json.loads((directory / NAME).read_text())
        return Record(**{"host": "", **values})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{str(directory / NAME)!r} is damaged ({error}), so nobody knows what its run was. Remove it, and go on "
            "with --ckpt_path."
        ) from error


def of_holder(directory: Path, seconds: float = 2.0) -> Record | None:
    """What the process noted that holds this directory: it does so right after it took it."""
    until = time.monotonic() + seconds
    while (record := read(directory)) is None and time.monotonic() < until:
        time.sleep(0.02)
    return record


def describe(trainer: Trainer, module: Module) -> Record:
    """This run, as far as it is known before it has a directory."""
    kind = type(module)
    job: dict[str, Any] = {"module": f"{kind.__module__}.{kind.__qualname__}", "hparams": _hparams(module)}
    if trainer.config:
        job["command"] = {key: trainer.config[key] for key in WHAT if trainer.config.get(key) is not None}
    text = json.dumps(job, default=lambda value: type(value).__name__, sort_keys=True)
    return Record(json.loads(text), supervisor=supervisor(os.environ), fit=next(_fits))


def _hparams(module: Module) -> dict[str, Any]:
    return capture.plain_hparams({k: v for k, v in module.hparams.__dict__.items() if not _is_live(v)})


def _is_live(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module) or (callable(value) and not isinstance(value, type))


def supervisor(environ: Mapping[str, str]) -> str:
    """Who would start these processes again: torch's elastic agent, by its job's name, else by its process."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return ""
    name = environ["TORCHELASTIC_RUN_ID"]
    return f"torchelastic {name if name not in ('', 'none') else f'{socket.gethostname()} {os.getppid()}'}"


def is_earlier_attempt(record: Record, now: Record) -> bool:
    """Whether the same supervisor started that run, in processes that are gone."""
    same = (record.supervisor, record.fit, record.job) == (now.supervisor, now.fit, now.job)
    return bool(now.supervisor) and same and record.process != now.process


def difference(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> str:
    """The first thing in which two jobs differ, in words."""
    for key in sorted({*one, *other}):
        a, b = one.get(key), other.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            if text := difference(a, b, f"{prefix}{key}."):
                return text
        elif a != b:
            return f"{prefix}{key} was {a!r} and is {b!r}"
    return ""


@contextmanager
def held(directory: Path) -> Iterator[bool]:
    """Say to others that this directory's run is alive, for as long as this lasts; whether nobody else had said so.

    The system's lock says it, which ends with the process however that ends. On a file system without locks the process
    that ``run.json`` names is looked for, on this machine.
    """
    with _locked(directory) as free:
        yield _seems_dead(read(directory)) if free is None else free


@contextmanager
def deciding(directory: Path | None) -> Iterator[None]:
    """Let one process at a time decide which directory below this one its run has. Waits for the others, though not for
    long: a run of another kind may have this directory itself."""
    if directory is None:
        yield
        return
    with written(directory):
        pass
    with ExitStack() as leaving:
        until = time.monotonic() + WAIT_S
        while leaving.enter_context(_locked(directory)) is False and time.monotonic() < until:
            leaving.close()
            time.sleep(0.02)
        yield


WAIT_S = 10.0


@contextmanager
def _locked(directory: Path) -> Iterator[bool | None]:
    """Whether the directory was free and is locked now; None where nothing can be locked."""
    if fcntl is None:
        yield None
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free: bool | None = True
        except BlockingIOError:
            free = False
        except OSError:
            free = None
        yield free
    finally:
        os.close(handle)


def _seems_dead(record: Record | None) -> bool:
    if record is None or record.host != socket.gethostname() or record.process == os.getpid() or os.name != "posix":
        return True
    return not is_running(record.process)
