"""A run of two ranks of which one fails ends soon, names it, and leaves nothing: a cover of failure_table.py."""

import failure_table
import pytest
from full import FULL

# test_c11_one_rank_raises.py and test_launch.py have raise, exit 3 and kill -9 under local; test_ray.py more of Ray
COVER = [
    ("hang", 1, "local"),
    ("collective", 0, "local"),
    ("save", 1, "local"),
    ("kill -9", 1, "torchrun"),
    ("guard", 0, "torchrun"),
    ("raise", 1, "ray"),
]
CELLS = [cell for cell in failure_table.cells() if FULL or cell in COVER]
LEFT_OUT = len(list(failure_table.cells())) - len(CELLS)


@pytest.mark.parametrize(("kind", "rank", "launcher"), CELLS)
def test_it_ends_soon_and_names_the_rank(kind, rank, launcher):
    if launcher == "ray" and not failure_table.has_ray():
        pytest.skip("no Ray, or no network namespace for it")
    row = failure_table.run(kind, rank, launcher)
    print(row.cells(), f"({LEFT_OUT} of the table's cells are left out; TRIVET_CI_FULL=1 runs all)")
    assert not row.faults(), row.output
