"""What the parts of a checkpoint directory are called, and how an error gets the path of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CheckpointError, TrivetError

TENSORS = "tensors"
RANKS = "strategy/rank"  # begins the names of tensors that one rank alone has
# begin those of tensors that all ranks have and that belong to a parameter, whose name follows: see `manual.pending`
SHARED = ("strategy/all/gradient/", "strategy/all/aside/")
STATE = "state.pt"
AS_TENSORS = {"module", "beside", "strategy"}  # fields of a TrainState that are not in state.pt
OPTIMIZER_TENSORS = "tensors"  # in state.pt, per optimizer: parameter name -> keys whose values are in tensors/


@contextmanager
def errors(what: str) -> Iterator[None]:
    """Make every exception inside a `CheckpointError` that begins with ``what``; other errors of Trivet stay."""
    try:
        yield
    except CheckpointError as error:
        raise error if str(error).startswith("cannot ") else CheckpointError(f"{what}: {error}") from error
    except TrivetError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
