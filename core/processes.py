"""Whether a process of this machine still runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process runs. A dead child of this one counts as ended before anybody has collected its status."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except (ChildProcessError, AttributeError):  # not our child, already collected, or a system without waitid
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def end_stopped(pid: int) -> bool:
    """Kill the process if it is stopped (SIGSTOP, a debugger): it heeds no other signal. Whether it was; on Linux."""
    try:
        stopped = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        if stopped:
            os.kill(pid, signal.SIGKILL)
        return stopped
    except OSError:  # it has ended, or is another user's
        return False
