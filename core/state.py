"""What a run is made of: `Progress`, the only counter, and `TrainState`, the closed list of what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Progress:
    """Where a run stands. The only counter: checkpoints store it and log records carry it.

    ``epoch``: epochs completed; ``batch``: micro-batches of this rank taken in the current epoch; ``update``: updates
    applied since the start, whatever the number of optimizers; ``skipped``: updates not applied (overflow, bad batch);
    ``epoch_update``: updates tried in the current epoch; ``samples``: samples of all ranks since the start;
    ``earlier``: micro-batches of this rank in completed epochs; ``validated`` and ``validated_update``: at the last
    validation the micro-batches since the start, and ``update``; ``scheduled``: whether the schedules of the
    epoch were stepped (these, so that a run saved on the way through an epoch's end goes on right there);
    ``seconds``: time spent in training, over all resumed parts.
    """

    epoch: int = 0
    batch: int = 0
    update: int = 0
    skipped: int = 0
    epoch_update: int = 0
    earlier: int = 0
    validated: int = 0
    validated_update: int = 0
    scheduled: bool = False
    samples: float = 0.0
    seconds: float = 0.0

    def complete_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.earlier += self.batch
        self.batch = self.epoch_update = 0
        self.scheduled = False

    def note_validation(self) -> None:
        """Validation was run here."""
        self.validated, self.validated_update = self.earlier + self.batch, self.update

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})


@dataclass
class TrainState:
    """All that a checkpoint stores. What is not here is not state.

    ``module``: tensors by the user's names. ``optimizers``: one entry per optimizer with ``state`` (parameter name ->
    key -> tensor or plain value) and ``groups`` (list of options, each with ``params``, the parameter names).
    ``scaler``: the loss scaler or None. ``data``: the position in the training data. ``seed``: the run's seed, from
    which every random number follows by position. ``host_noise`` and ``torch_noise``: by rank, the updates that
    Python's and numpy's streams, and torch's, were last seeded for (`Run.host_noise`). ``metrics``: accumulators of
    the current epoch. ``callbacks``: by state key. ``beside``: tensors that callbacks keep beside the module's,
    laid out like those. ``strategy``: what the strategy itself keeps; names that begin with ``rank<n>/`` are of one
    rank, see `Strategy.own_state`.
    """

    progress: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Tensor] = field(default_factory=dict)
    beside: dict[str, Tensor] = field(default_factory=dict)
    strategy: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    scaler: dict[str, Any] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    host_noise: list[int] = field(default_factory=list)
    torch_noise: list[int] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    datamodule: dict[str, Any] = field(default_factory=dict)
    user: dict[str, Any] = field(default_factory=dict)
    hparams: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnState:
    """What a strategy keeps beside weights and optimizer state, for a checkpoint.

    ``alike``: tensors that are the same on all ranks; rank 0's are stored. ``apart``: this rank's, stored of every one.
    ``world_size``: of the run that wrote it; where it is another one, ``apart`` is empty.
    """

    alike: Mapping[str, Tensor] = field(default_factory=dict)
    apart: Mapping[str, Tensor] = field(default_factory=dict)
    world_size: int | None = None
