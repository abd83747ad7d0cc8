"""Whether a process of this machine still runs."""

from __future__ import annotations

import os


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
