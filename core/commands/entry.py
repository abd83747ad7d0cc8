"""Where every command starts: ``trivet ...``, ``python -m trivet ...`` and `trivet.cli` in a user's script.

Nothing heavy is imported before the command is known, so that help, version and the list of plugins answer at once.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import PluginError, RankFailed, Terminated, TrivetError
from ..imports import uncollected

if TYPE_CHECKING:
    from ..data.datamodule import DataModule
    from ..module import Module
    from ..trainer import Trainer
    from .links import Links
    from .script import Script

USAGE = """\
usage: {prog} COMMAND [--flag value ...]

Train PyTorch modules with any strategy, accelerator and precision.

commands:
  fit         train a model
  validate    run the validation of a model, usually with --ckpt_path
  test        test a model
  predict     predict with a model, and keep what it predicts in files
  plan        show what a combination of flags would run, without running it
  plugins     list the installed strategies, accelerators, precisions, ...;
              --matrix shows what goes together, `plugins new` writes one
  checkpoint  list, inspect, verify, consolidate, diff or convert checkpoints
  env         show who started this process, and what a profile would set
  submit      hand a command to a cluster, or print the job (--dry-run)

{prog} COMMAND --help tells more.
With --strategy NAME, --model CLASS and so on given, it has their options, too.

options:
  -h, --help  show this message
  --version   show the version
"""
COMMANDS = ("fit", "validate", "test", "predict", "plan", "plugins", "checkpoint", "env", "submit")


def cli(
    model: type[Module] | Callable[..., Module] | None = None,
    data: type[DataModule] | Callable[..., DataModule] | None = None,
    args: Sequence[str] | None = None,
    *,
    subclasses: bool = False,
    trainer_defaults: Mapping[str, Any] | None = None,
    links: Links | None = None,
    save_config: bool = True,
) -> Trainer | None:
    """Give a script the commands of ``trivet``: ``python train.py fit --strategy ddp --model.lr 0.1``.

    Args:
        model: The module class, whose arguments are then ``--model.NAME``. None leaves it to ``--model pkg.Class``.
        data: The data module class, likewise, with ``--data.NAME``.
        args: The command line without the program's name. None takes ``sys.argv``.
        subclasses: Whether ``model`` and ``data`` are what ``--model`` and ``--data`` have to be subclasses of.
        trainer_defaults: Defaults of this script for Trainer arguments, below configuration files and flags.
        links: Values that are taken from others where no flag gives them, as ``{"data.num_classes":
            "model.num_classes"}``; with a function of the value ``{"data.classes": ("model.num_classes", len)}``. The
            source is an argument, or an attribute of the data module when it is made, else when it is set up.
        save_config: Whether the configuration is stored in the directory of each run.

    Returns:
        The trainer after the commands that use one, else None.

    Raises:
        SystemExit: With the exit code, where that is not 0 (the message is then on standard error), and after help.
    """
    prog = f"python {os.path.basename(sys.argv[0])}" if sys.argv[0].endswith(".py") else "trivet"
    argv = sys.argv[1:] if args is None else args
    from .script import Script

    script = Script(
        model, data, subclasses, trainer_defaults=trainer_defaults or {}, links=links or {}, save_config=save_config
    )
    code, trainer = run(argv, prog=prog, script=script)
    if code:
        raise SystemExit(code)
    return trainer


def run(argv: Sequence[str], *, prog: str, script: Script | None = None) -> tuple[int, Trainer | None]:
    """Run one command; return the exit code and, for the commands that have one, the trainer."""
    command = argv[0] if argv else "--help"
    if command in ("-h", "--help"):
        print(USAGE.format(prog=prog), end="")
        return (0 if argv else 2), None
    if command == "--version":
        import trivet

        print(f"trivet {trivet.__version__}")
        return 0, None
    if command not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(command, COMMANDS, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        what = f"{command} stands before the command" if command.startswith("-") else f"there is no command {command!r}"
        _complain(prog, f"{what}.{guess} Commands: {', '.join(COMMANDS)}.")
        return 2, None
    try:
        if command == "plugins":
            from .plugins import show_plugins

            return show_plugins(argv[1:], prog=f"{prog} plugins"), None
        if command == "checkpoint":
            from .checkpoint import run_checkpoint

            return run_checkpoint(argv[1:], prog=f"{prog} checkpoint"), None
        if command == "env":
            from .env import show_env

            return show_env(argv[1:], prog=f"{prog} env"), None
        if command == "submit":
            from .submit import submit

            program = ("python", sys.argv[0]) if prog.startswith("python ") else ("trivet",)
            return submit(argv[1:], prog=f"{prog} submit", program=program), None
        with uncollected():
            from .job import run_job
            from .script import Script

        return run_job(command, argv[1:], prog=f"{prog} {command}", script=script or Script())
    except RankFailed as error:
        from ..launch import environments

        sys.stdout.flush()
        if environments.detect() is not None:  # another rank failed, whose own process shows it: see launch/uncaught.py
            raise
        cause, files = error.__cause__, re.findall(r'^ *File "([^"]+)"', error.traceback, re.MULTILINE)
        if isinstance(cause, TrivetError) and not any(map(_is_users, files)):  # refused in a process that was started
            _complain(f"{prog} {command}", str(cause))
            return 2, None
        if error.traceback:
            print(error.traceback.rstrip(), file=sys.stderr)
        _complain(f"{prog} {command}", str(error))
        return 1, None
    except TrivetError as error:
        if not isinstance(error, PluginError) and _passes_user_code(error):  # a plugin error names the line itself
            raise  # the traceback tells the user which of their lines it was
        _complain(f"{prog} {command}", str(error))
        return 2, None
    except KeyboardInterrupt:
        _complain(f"{prog} {command}", "interrupted")
        return 130, None
    except Terminated as error:  # said already, with the checkpoint
        return 128 + error.signal, None


def _passes_user_code(error: BaseException) -> bool:
    """Whether the error came out of the user's code."""
    frame = error.__traceback__
    while frame is not None:
        if _is_users(frame.tb_frame.f_code.co_filename):
            return True
        frame = frame.tb_next
    return False


def _is_users(path: str) -> bool:
    """Whether a file is neither ours nor installed: a script, a model, a data module."""
    own = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == __name__.partition(".")[0]]
    folders = {os.path.dirname(file) for module in own if (file := getattr(module, "__file__", None))}
    return not path.startswith(
        ("<frozen", *(f"{folder}{os.sep}" for folder in {*folders, *sysconfig.get_paths().values()}))
    )


def _complain(prog: str, text: str) -> None:
    from .text import for_terminal

    print(for_terminal(f"{prog}: {text}"), file=sys.stderr)
