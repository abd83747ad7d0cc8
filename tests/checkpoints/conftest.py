"""What these tests print at the end of a session."""

from __future__ import annotations

import sys
from typing import Any


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    tables = sys.modules.get("chosen")
    for line in tables.summary() if tables is not None else ():
        terminalreporter.write_line(line)
    module = sys.modules.get("universal_table")  # imported where its test was collected
    if module is not None and module.TABLE:
        for line in module.summary(passed=exitstatus == 0):
            terminalreporter.write_line(line)
