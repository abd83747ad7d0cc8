"""``trivet submit``: hand exactly one command to a cluster, or print the job that would be handed over."""

from __future__ import annotations

import re
from argparse import REMAINDER, Namespace
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigurationError
from ..launch import profiles
from ..launch.submitter import Job
from ..registry import make
from .words import Words

RUNS = ("fit", "validate", "test", "predict")


def submit(argv: Sequence[str], *, prog: str, program: tuple[str, ...]) -> int:
    """Print or submit. ``program`` is how this program is started on the cluster."""
    options = _parser(prog).parse_args(list(argv))
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or command[0] not in RUNS:
        found = f"found {command[0]!r}" if command else "found none"
        raise ConfigurationError(
            f"expected the command to submit after the options, one of {', '.join(RUNS)}; {found}. "
            f"Example: {prog} --to slurm --nodes 2 {RUNS[0]} --model package.Class."
        )
    submitter = make("submitter", options.to)
    job = _job(options, program, command, submitter.plugin.options, str(submitter))
    print(submitter.plugin.render(job) if options.dry_run else submitter.plugin.submit(job), end="")
    if not options.dry_run:
        print()
    return 0


def _parser(prog: str) -> Words:
    parser = Words(
        prog=prog,
        usage=f"{prog} --to NAME [options] [--] COMMAND [--flag value ...]",
        description="Hand a command to a cluster as a job. Options of the job stand before the command.",
        epilog=f"`{prog} --to slurm --nodes 2 --devices 4 --dry-run fit --strategy ddp ...` prints the script. Which "
        "clusters there are: `trivet plugins submitter`.",
    )
    add = parser.add_argument
    add("--to", required=True, metavar="NAME", help="slurm, kubeflow (a TrainJob), pytorchjob, ray, or another one's")
    add("--dry-run", action="store_true", help="print the script or manifest, and hand over nothing")
    add("--name", metavar="NAME", help="of the job; by default that of the command")
    add("--nodes", type=int, metavar="N", help="machines; by default the command's --num_nodes, or 1")
    add("--devices", type=int, metavar="N", help="processes on each; by default the command's --devices, or 1")
    add("--cpus", type=int, metavar="N", help="cores for each process")
    add("--gpus", type=int, metavar="N", help="GPUs for each machine; with --accelerator cuda one for each process")
    add("--memory", metavar="SIZE", help="for each machine, as the cluster writes it: 64G, 64Gi")
    add("--time", metavar="TIME", help="limit: minutes, HH:MM:SS or D-HH:MM:SS")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for the job; may be repeated")
    own = parser.add_argument_group("options of some clusters")
    add = own.add_argument
    add("--queue", metavar="NAME", help="slurm's partition; Kueue's local queue")
    add("--account", metavar="NAME", help="slurm: who pays")
    add("--image", metavar="NAME", help="container image; slurm needs pyxis for it")
    add("--requeue", action="store_true", default=None, help="slurm: save before time is over, queue again, and go on")
    add(
        "--signal",
        metavar="SECONDS",
        help="slurm: before its end signal the run, which saves and ends; 90 with --requeue",
    )
    add("--output", metavar="PATTERN", help="slurm: the file of what the job prints")
    add("--setup", action="append", metavar="LINE", help="slurm: a line before srun: 'module load cuda'")
    add("--sbatch", action="append", metavar="OPTION", help="slurm: another option: --sbatch=--constraint=a100")
    add("--namespace", metavar="NAME", help="Kubernetes: where the job is made")
    add("--runtime", metavar="NAME", help="kubeflow: the training runtime, torch-distributed by default")
    add("--address", metavar="URL", help="ray: the job server")
    add("--working-dir", metavar="PATH", help="ray: what the job finds in its directory, this one by default")
    add("--runtime-env", metavar="JSON", help="ray: more of its runtime environment")
    parser.add_argument("command", nargs=REMAINDER, metavar="COMMAND", help=f"one of {', '.join(RUNS)}, with its flags")
    return parser


ALL = ("to", "dry_run", "name", "nodes", "devices", "cpus", "gpus", "memory", "time", "env", "command")


def _job(options: Namespace, program: tuple[str, ...], command: list[str], takes: frozenset[str], who: str) -> Job:
    own = {name: value for name, value in vars(options).items() if name not in ALL and value is not None}
    for name in own:
        if name not in takes:
            flag = name.replace("_", "-")
            raise ConfigurationError(
                f"--{flag}: {who} has no such option, and would have to ignore it. It has "
                f"{', '.join(sorted('--' + one.replace('_', '-') for one in takes))} beside those of every job."
            )
    devices = _agreed("devices", options.devices, _count(_value(command, "devices")))
    accelerator = _value(command, "accelerator") or "auto"
    profile = _value(command, "comm_profile")
    if profile not in (None, "auto"):
        profiles.find(str(profile))
    for name in ("cpus", "gpus"):
        if (getattr(options, name) or 0) < 0:
            raise ConfigurationError(f"--{name} {getattr(options, name)}: expected a number from 0 up.")
    gpus = options.gpus if options.gpus is not None else devices if accelerator in ("cuda", "gpu") else 0
    return Job(
        program=program,
        command=tuple(command),
        name=options.name or f"trivet-{command[0]}",
        nodes=_agreed("nodes", options.nodes, _count(_value(command, "num_nodes")), "num_nodes"),
        devices=devices,
        cpus=options.cpus,
        gpus=gpus,
        memory=options.memory,
        time=options.time,
        environ=dict(_pair(text) for text in options.env),
        comm_profile=profile,
        options=own,
    )


def _value(command: list[str], key: str) -> str | None:
    """The last value that a flag has in the command, as `trivet fit` reads it."""
    found = None
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_").removeprefix("trainer.") == key:
            found = value if equals else command[place + 1] if place + 1 < len(command) else None
    return found


def _count(text: str | None) -> int | None:
    """How many a value of ``--devices`` asks for; None where the cluster says it."""
    if text is None or text in ("auto", "-1"):
        return None
    listed = text.strip("[] ").split(",")
    if not all(re.fullmatch(r"\s*\d+\s*", one) for one in listed):
        return None  # `fit` will say what is wrong with it
    return len(listed) if len(listed) > 1 or text.startswith("[") else int(text)


def _agreed(option: str, given: int | None, wanted: int | None, flag: str = "devices") -> int:
    if given is not None and wanted is not None and given != wanted:
        raise ConfigurationError(
            f"--{option} {given} of the job and --{flag} {wanted} of the command contradict each other. Leave out one."
        )
    found: Any = given if given is not None else 1 if wanted is None else wanted
    if found < 1:
        raise ConfigurationError(f"--{option} {found}: expected a number from 1 up.")
    return int(found)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigurationError(f"--env {text!r}: expected NAME=VALUE.")
    return name, value
