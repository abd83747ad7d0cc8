"""Whether all cases run: with TRIVET_CI_FULL=1. Otherwise tables and long tests are cut down to what fits into CI."""

import os

FULL = os.environ.get("TRIVET_CI_FULL") == "1"
