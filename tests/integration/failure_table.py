"""How a run ends when one of its two ranks fails: each kind, on rank 0 and on rank 1, under each launcher.

``python failure_table.py`` runs all of it and prints the table; ``--page docs/running/failures.md`` puts it there,
``--ray PYTHON`` runs the rows of Ray with another interpreter, one that has it. test_failures.py runs a cover.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
KINDS = (
    "raise", "sys.exit", "exit 3", "kill -9", "hang", "hang in C", "stop", "collective", "guard", "oom", "teardown",
    "save",
)  # fmt: skip
LAUNCHERS = ("local", "torchrun", "ray")
TIMEOUT_S = 4
LIMIT_S = 10  # from the failure until all has ended, and the time-out on top of it where a rank hangs
WAITS = dict.fromkeys(("hang", "hang in C", "stop", "collective", "guard"), TIMEOUT_S)
# What has to be said of the rank that failed, by kind; None where torch's agent says it (torchrun) or Trivet (else).
SAID = {
    "raise": "ValueError: boom",
    "sys.exit": "SystemExit: 3",
    "exit 3": "exit code 3|an early end",
    "kill -9": "SIGKILL|an early end",
    "hang": r"Hang: nothing happened for 4 s .*Failing\.training_step",
    "hang in C": r"Hang: .*rank {rank} does not answer",
    "stop": r"Hang: .*rank {rank} does not answer",
    "collective": r"CollectiveMismatch: ranks call different collectives.*waits in barrier.*waits in backward",
    "guard": r"CollectiveMismatch: a collective inside trivet.rank_zero.*waits in all_reduce",
    "oom": "OutOfMemoryError: CUDA out of memory",
    "teardown": "ValueError: boom",
    "save": "ValueError: boom",
}
ALONE = ("unshare", "-n" if os.geteuid() == 0 else "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@dataclass
class Row:
    """What came of one cell."""

    kind: str
    rank: int
    launcher: str
    seconds: float
    first: str
    named: str
    code: int
    left: list[str]
    port_free: bool
    hooks: str
    output: str

    def faults(self) -> list[str]:
        """What is not as it has to be."""
        text = SAID[self.kind].format(rank=self.rank)
        said = re.compile(rf"rank {self.rank} failed with (?:{text})")
        shown = re.compile(rf"(?m)^(?:\[rank{self.rank}\]: )?(?:ValueError: boom|SystemExit: 3|torch.OutOfMemoryError)")
        limit = LIMIT_S + WAITS.get(self.kind, 0)
        found = {
            f"it took {self.seconds:.1f} s": self.seconds > limit,
            "exit code 0": self.code == 0,
            f"processes are left: {self.left}": bool(self.left),
            "the port is not free": not self.port_free,
            f"nobody said {said.pattern!r}": not said.search(self.output) and not shown.search(self.output),
            "the traceback is not shown once": len(re.findall(r'raise ValueError\("boom"\)|sys.exit\(3\)', self.output))
            > 1,
            f"hooks: {self.hooks}": self.kind in ("raise", "sys.exit", "oom")
            and self.hooks != "ran on both, and knew which rank",
            f"the first line is {self.first!r}": not self._good_first(),
        }
        return [text for text, wrong in found.items() if wrong]

    def _good_first(self) -> bool:
        return bool(re.search(r"Traceback|Stack of rank|rank \d failed|Thread 0x|Timeout", self.first))

    def cells(self) -> str:
        left = "none" if not self.left and self.port_free else "FAILED"
        first = self.first if len(self.first) <= 72 else f"{self.first[:69]}..."
        named = self.named if len(self.named) <= 110 else f"{self.named[:107]}..."
        text = [self.kind, self.rank, self.launcher, f"{self.seconds:.1f}", f"`{first}`", f"`{named}`", self.code, left]
        return f"| {' | '.join(str(one).replace('|', '/') for one in text)} |"


def table(rows: list[Row]) -> list[str]:
    head = ("kind", "rank", "launcher", "s", "first line", "named as", "exit code", "processes, ports left")
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(row.cells() for row in rows)]


def cells() -> Iterator[tuple[str, int, str]]:
    for launcher in LAUNCHERS:
        for kind in KINDS:
            for rank in (0, 1) if kind != "guard" else (0,):  # nobody else is in it
                yield kind, rank, launcher


def command(kind: str, rank: int, launcher: str, port: int, python: str) -> list[str]:
    fit = [
        "fit", "--model.kind", kind, "--model.rank", str(rank), "--accelerator", "cpu", "--strategy", "ddp",
        "--max_epochs", "1", "--timeout", str(TIMEOUT_S), "--enable_progress_bar", "false", "--logger", "false",
        "--default_root_dir", "runs",
    ]  # fmt: skip
    script = str(HERE / "failing.py")
    if launcher == "torchrun":
        return [python, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", script, *fit]
    if launcher == "ray":
        return [*ALONE, python, script, *fit, "--devices", "2", "--launcher", "ray"]
    return [python, script, *fit, "--devices", "2"]


def run(kind: str, rank: int, launcher: str, python: str = sys.executable) -> Row:
    """Run one cell to its end, and see what is left of it."""
    with tempfile.TemporaryDirectory(prefix="failures-") as name:
        notes = Path(name)
        port = free_port()
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TORCHELASTIC"))}
        environ |= {"NOTES": name, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HOME": name}
        with (notes / "output").open("w") as output:
            process = subprocess.Popen(
                command(kind, rank, launcher, port, python), cwd=name, env=environ, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            code = process.wait(120)
        except subprocess.TimeoutExpired:
            code = 0  # what no cell may end with
        ended = time.time()
        left = processes(name, 5.0)
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        process.wait()
        text = (notes / "output").read_text(errors="replace").replace(f"{HERE}{os.sep}", "")
        failed = notes / "failed-at"
        seconds = ended - float(failed.read_text()) if failed.exists() else float("inf")
        lines = [line for line in text.splitlines() if line.strip() and not of_others(line)]
        named = next((m[0] for line in lines if (m := re.search(r"rank \d failed with .*", line))), "")
        named = named or next((line for line in lines if re.search(r"(ValueError|OutOfMemoryError): ", line)), "")
        first = re.sub(rf"{re.escape(name)}/?", "", lines[0]) if lines else ""
        hooks = hooks_of(notes, rank)
        return Row(kind, rank, launcher, seconds, first, named, code, left, is_free(port), hooks, text)


def hooks_of(notes: Path, rank: int) -> str:
    """Whether on_exception and teardown ran on both ranks, and the other one's was told which rank failed."""
    files = [notes / f"{hook}-{one}" for hook in ("on_exception", "teardown") for one in range(2)]
    if missing := [file.name for file in files if not file.exists()]:
        return f"{', '.join(missing)} did not run"
    told = (notes / f"on_exception-{1 - rank}").read_text()
    return "ran on both, and knew which rank" if f"rank {rank} failed with" in told else f"the other was told {told!r}"


def of_others(line: str) -> bool:
    """Whether torch's agent, or Ray, printed a line of its own log."""
    return bool(re.match(r"\[?[WEI]\d{4}|\[20\d\d-|\(.*pid=|\d{4}-\d\d-\d\d .*(INFO|WARNING)|\*{5}|=====", line)) or (
        "[c10d]" in line or "network_util.cc" in line
    )


def processes(mark: str, seconds: float) -> list[str]:
    """Processes that have the mark in their environment, after they had some time to end."""
    limit = time.monotonic() + seconds
    while True:
        found = [
            path.name
            for path in Path("/proc").glob("[0-9]*")
            if path.name != str(os.getpid()) and mark.encode() in _environ(path) and not _is_dead(path)
        ]
        if not found or time.monotonic() > limit:
            return found
        time.sleep(0.1)


def _environ(path: Path) -> bytes:
    try:
        return (path / "environ").read_bytes()
    except OSError:
        return b""


def _is_dead(path: Path) -> bool:
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def has_ray(python: str = sys.executable) -> bool:
    if not all(map(shutil.which, ("unshare", "ip"))):
        return False
    if python == sys.executable and importlib.util.find_spec("ray") is None:
        return False
    return subprocess.run([*ALONE, python, "-c", "import ray"], capture_output=True).returncode == 0


def main() -> int:
    from trivet.testing.report import write_between_marks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--ray", default=sys.executable)
    parser.add_argument("--only", default="", help="launcher, kind or rank, separated by commas")
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    where = f"at {commit.stdout.strip()} on {date.today()}"
    rows: list[Row] = []
    for kind, rank, launcher in cells():
        if given.only and not {kind, str(rank), launcher} >= set(given.only.split(",")):
            continue
        if launcher == "ray" and not has_ray(given.ray):
            continue
        row = run(kind, rank, launcher, given.ray if launcher == "ray" else sys.executable)
        rows.append(row)
        print(row.cells(), *row.faults(), flush=True)
        if row.faults():
            print(row.output, file=sys.stderr, flush=True)
        if given.page is not None:  # after each, so that one that is broken off has shown what it found
            write_between_marks(given.page, [summary(rows, where), "", *table(rows)])
    print(summary(rows, where))
    return int(any(row.faults() for row in rows))


def summary(rows: list[Row], where: str) -> str:
    good = sum(not row.faults() for row in rows)
    return (
        f"{len(rows)} of {len(list(cells()))} cells ran {where}, {good} ended as they have to. `timeout` was "
        f"{TIMEOUT_S} s."
    )


if __name__ == "__main__":
    sys.exit(main())
