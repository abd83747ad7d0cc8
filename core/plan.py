"""The Plan: everything that was decided about a run before any process starts, as a value."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What was decided: printed before launch, stored in each checkpoint, compared with the first update.

    ``strategy``, ``accelerator`` and ``precision`` are names; ``distributions``, ``versions`` and ``options`` tell more
    of each, by kind. ``devices`` counts processes per node, ``device_ids`` says which devices they use where the user
    listed them. ``backend`` is None for one process. Dtypes are names such as ``"bfloat16"``; ``state_dtype`` is the
    optimizer state's. ``accumulate`` is None as long as it follows from ``global_batch_size`` and the loader.
    ``launcher`` is ``"single"`` (this process), the launcher (``"local"``) or the environment of the processes.
    ``comm_profile`` names a set of environment variables (`launch.profiles`), None where none was asked for.
    ``notes`` are sentences for the user.
    """

    strategy: str
    accelerator: str
    precision: str
    device_type: str
    param_dtype: str
    compute_dtype: str
    reduce_dtype: str
    state_dtype: str = ""  # of plans written before it was a field
    backend: str | None = None
    devices: int = 1
    device_ids: tuple[int, ...] | None = None
    num_nodes: int = 1
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    scaling: Mapping[str, float] | None = None
    clip: Mapping[str, Any] | None = None
    accumulate: int | None = 1
    global_batch_size: int | None = None
    manual: bool = False
    on_skip: str | None = None
    deterministic: bool = False
    launcher: str = "single"
    comm_profile: str | None = None
    returns_weights: bool = True
    distributions: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def device_index(self, local_rank: int) -> int:
        """What to ask `Accelerator.device` for: the local rank, or the id that the user listed for it."""
        return local_rank if self.device_ids is None else self.device_ids[local_rank]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and for checkpoints; the reverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The Plan that `to_dict` wrote, also after JSON. Keys that this version does not know are left out."""
        known = {f.name for f in fields(cls)}
        kept = {key: value for key, value in values.items() if key in known}
        for name in ("notes", "device_ids"):
            if kept.get(name) is not None:
                kept[name] = tuple(kept[name])
        return cls(**kept)

    def __str__(self) -> str:
        rows = [
            *((kind, self._plugin(kind)) for kind in ("strategy", "accelerator", "precision")),
            ("processes", self._processes()),
            ("device", f"{self.device_type}, {f'collectives by {self.backend}' if self.backend else 'no collectives'}"),
            *([("comm profile", self.comm_profile)] if self.comm_profile else []),
            ("mesh", " x ".join(f"{name}={size}" for name, size in self.mesh.items()) or "none"),
            ("parameters", self._parameters()),
            ("compute", self.compute_dtype),
            ("reduction", self.reduce_dtype),
            ("loss scaling", self._scaling()),
            ("clipping", f"by {self.clip['algorithm']}, {self.clip['value']}" if self.clip else "none"),
            ("update", self._update()),
            ("weights", "returned to the caller" if self.returns_weights else "in the checkpoint only"),
        ]
        lines = [_fill(f"{name:<13}", value) for name, value in rows]
        lines += [_fill(f"{'' if index else 'notes':<13}- ", note) for index, note in enumerate(self.notes)]
        return "\n".join(lines)

    def banner(self) -> str:
        """The Plan in a line, and a line for each note: what a run says before it starts."""
        processes = "1 process" if self.world_size == 1 else f"{self.world_size} processes"
        dtypes = f"parameters {self.param_dtype}, compute {self.compute_dtype}, reduction {self.reduce_dtype}"
        head = f"trivet: {self.strategy} on {self.accelerator}, {processes}, {self.precision} ({dtypes})"
        return "\n".join([head, *(f"trivet: {note}" for note in self.notes)])

    def _plugin(self, kind: str) -> str:
        origin = f"{self.distributions.get(kind, 'local')} {self.versions.get(kind, '')}".strip()
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.get(kind, {}).items())
        return f"{getattr(self, kind)} ({origin}){f' with {options}' if options else ''}"

    def _processes(self) -> str:
        started = {"single": "this process", "local": "started here"}.get(self.launcher, f"started by {self.launcher}")
        ids = f", on devices {', '.join(map(str, self.device_ids))}" if self.device_ids is not None else ""
        per_node = f" ({self.devices} on each of {self.num_nodes} nodes)" if self.num_nodes > 1 else ""
        return f"{self.world_size}{per_node}, {started}{ids}"

    def _parameters(self) -> str:
        if self.state_dtype in ("", self.param_dtype):
            return f"{self.param_dtype}, and so the optimizer state"
        return f"{self.param_dtype}; the optimizer steps a copy in {self.state_dtype}, and so is its state"

    def _scaling(self) -> str:
        if self.scaling is None:
            return "none"
        return "dynamic, " + ", ".join(f"{key} {value:g}" for key, value in self.scaling.items())

    def _update(self) -> str:
        parts = ["manual optimization" if self.manual else "automatic optimization"]
        if self.accumulate is None:
            parts.append(f"accumulation to {self.global_batch_size} samples")
        else:
            parts.append(f"{self.accumulate} micro-batch{'es' if self.accumulate > 1 else ''} per process")
        if self.on_skip:
            parts.append(f"None from the step skips the {self.on_skip}")
        if self.deterministic:
            parts.append("deterministic")
        return ", ".join(parts)


def _fill(head: str, text: str) -> str:
    return textwrap.fill(
        text,
        80,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
