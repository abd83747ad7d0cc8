"""Settings for all tests."""

from __future__ import annotations

import os

# Two worker processes with a thread per core each would wait for one another on a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
