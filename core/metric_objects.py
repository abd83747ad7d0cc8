"""Metric objects by duck typing (update, compute, reset): those of torchmetrics, which need not be installed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .errors import CheckpointError, ConfigurationError
from .torch_compat import set_update_count
from .uneven import gather


@runtime_checkable
class MetricObject(Protocol):
    """Accumulates over batches; ``compute`` gives the value so far, over all ranks if it synchronises itself."""

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


@runtime_checkable
class Collection(MetricObject, Protocol):
    """Several of them under names, computed together, such as torchmetrics' MetricCollection."""

    def items(self) -> Any: ...


@runtime_checkable
class Stateful(MetricObject, Protocol):
    """One whose accumulators can be read and set by name: torchmetrics' Metric."""

    @property
    def metric_state(self) -> Mapping[str, Any]: ...

    @property
    def update_count(self) -> int: ...


State = dict[str, Any]


def is_collection(value: Any) -> bool:
    """Whether a mapping is a collection of metric objects."""
    return type(value) is not dict and isinstance(value, Collection)


def refused(name: str, enable_graph: bool) -> ConfigurationError:
    """The error for those of Lightning's options that could only be ignored."""
    if enable_graph:
        return ConfigurationError(
            f"log({name!r}, enable_graph=True): what is logged is a number by the time anybody reads it. Keep the "
            "tensor in an attribute of your own."
        )
    return ConfigurationError(
        f"log({name!r}, sync_dist_group=...): a logged value is reduced over all ranks. For a part of them reduce it "
        "yourself with torch.distributed and log the result with rank_zero_only=True, or sync_dist='sparse'."
    )


class Gathers:
    """A metric of torchmetrics that gathers by our function, until `remove`."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        metric.dist_sync_fn = gather

    def remove(self) -> None:
        self.metric.dist_sync_fn = None


class MetricObjects:
    """The metric objects that are attributes of a module; shared by the stages of a run.

    Those of torchmetrics are stored in checkpoints and put back, also the ones that are never logged. What one returns
    for a batch is remembered while `watch` is on, since ``on_step`` shows it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parts = [(path, part) for path, part in module.named_modules() if path and isinstance(part, MetricObject)]
        self.watched: list[Any] = [part for _, part in parts]
        self.stateful = {
            path: part for path, part in parts if isinstance(part, Stateful) and not isinstance(part, Collection)
        }
        self.batch_values: dict[int, Any] = {}

    def watch(self, world_size: int) -> list[Any]:
        """Remember what each returns for a batch, let them gather uneven states; gives handles with ``remove()``."""

        def keep(part: nn.Module, given: Any, value: Any) -> None:
            self.batch_values[id(part)] = value

        return [
            *(part.register_forward_hook(keep) for part in self.watched),
            *(
                Gathers(part)
                for part in self.watched
                if world_size > 1 and getattr(part, "dist_sync_fn", gather) is None
            ),
        ]

    def path_of(self, name: str, metric: Any, attribute: str | None) -> str:
        """The attribute of the module that holds a metric, so that all ranks and a resumed run find it."""
        if attribute is not None:
            if self.find(attribute) is not metric:
                raise ConfigurationError(
                    f"log({name!r}, metric_attribute={attribute!r}): the module's attribute of that name is not the "
                    "metric that is logged."
                )
            return attribute
        for path, part in self.module.named_modules():
            if part is metric:
                return str(path)
        for key, value in vars(self.module).items():
            if value is metric:
                return str(key)
        raise ConfigurationError(
            f"log({name!r}) got a {type(metric).__name__} that is no attribute of {type(self.module).__name__}, so it "
            "would be neither moved to the device nor found again by a resumed run. Assign it in __init__ (in an "
            "nn.ModuleDict or nn.ModuleList where there are many)."
        )

    def find(self, path: str) -> Any:
        """The metric under a dotted path, or None."""
        found: Any = self.module
        for part in path.split("."):
            found = getattr(found, part, None)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The accumulators of this rank that were updated since their reset, on the CPU."""
        return {
            path: {"count": metric.update_count, "state": copied(metric.metric_state, torch.device("cpu"))}
            for path, metric in self.stateful.items()
            if metric.update_count
        }

    def load_state_dict(self, shares: list[dict[str, Any]]) -> None:
        """Take back shares of ranks; several are merged, where the metric can do that."""
        for share in shares:
            for path, saved in share.items():
                metric = self.stateful.get(path)
                if metric is None:
                    continue  # the module has no such metric any more; its weights are checked elsewhere
                if not metric.update_count:
                    put(metric, saved["state"], saved["count"])
                    continue
                try:
                    metric.merge_state(moved(saved["state"], metric.device))  # type: ignore[attr-defined]
                except RuntimeError as error:
                    raise CheckpointError(
                        f"the checkpoint holds the metric {path!r} of more processes than there are now, and "
                        f"{type(metric).__name__} cannot merge them ({error}). Resume with as many processes, or from "
                        "the end of an epoch."
                    ) from error


def copied(state: Mapping[str, Any], device: torch.device | None = None) -> State:
    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone() if device is None else value.detach().to(device, copy=True)
        return [copy(item) for item in value] if isinstance(value, list) else value

    return {name: copy(value) for name, value in state.items()}


def moved(state: Mapping[str, Any], device: torch.device) -> State:
    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return [move(item) for item in value] if isinstance(value, list) else value

    return {name: move(value) for name, value in state.items()}


def put(metric: Any, state: Mapping[str, Any], count: int) -> None:
    metric.reset()  # what it computed before is void
    for name, value in moved(state, metric.device).items():
        setattr(metric, name, value)
    set_update_count(metric, count)


class ObjectSlot:
    """One metric object, or a collection, as it is logged."""

    __slots__ = (
        "entry", "key", "last", "logger", "metric", "name", "on_epoch", "on_step", "options", "path", "prog_bar",
        "suffix", "touched", "used",
    )  # fmt: skip

    def __init__(
        self, name: str, suffix: str, metric: Any, path: str, prog_bar: bool, logger: bool, on_step: bool,
        on_epoch: bool,
    ) -> None:  # fmt: skip
        self.name, self.suffix, self.metric, self.path = name, suffix, metric, path
        self.prog_bar, self.logger, self.on_step, self.on_epoch = prog_bar, logger, on_step, on_epoch
        self.options: tuple[Any, ...] | None = None
        self.last: Any = None
        self.touched = self.used = False
        self.key = name + suffix if name else f"{id(metric)}{suffix}"
        # by what ranks compare what they logged, and `absent` makes one; the first four words as `Slot.entry` has them
        self.entry = f"object of {prog_bar:d}{logger:d}{on_step:d}{on_epoch:d} {path} {suffix or '-'} {name}"

    @classmethod
    def absent(cls, entry: str, objects: MetricObjects) -> ObjectSlot:
        """The slot of what only other ranks logged, by their ``entry``: this rank takes part in computing it."""
        _, _, flags, path, suffix, name = entry.split(" ", 5)
        bits = [flag == "1" for flag in flags]
        return cls(name, suffix if suffix != "-" else "", objects.find(path), path, *bits)

    def values(self, value: Any, fork: str) -> Iterator[tuple[str, str, Any]]:
        """``(name, forked name, number)`` of what a batch or ``compute`` gave."""
        fork = fork if self.on_step and self.on_epoch else ""
        items = value.items() if isinstance(value, Mapping) and isinstance(self.metric, Collection) else [("", value)]
        for key, number in items:
            if not (isinstance(number, (int, float)) or (isinstance(number, Tensor) and number.numel() == 1)):
                found = f"shape {tuple(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
                raise ConfigurationError(
                    f"the metric logged as {self.name or key!r} gave {found}, and a metric is one number. Log each "
                    "part by a name of its own, from the value that compute() returns, in on_..._epoch_end."
                )
            name = self.name + key
            yield name + self.suffix, name + fork + self.suffix, number

    def compute(self) -> Any:
        """The value over all ranks. A metric of torchmetrics synchronises itself: all ranks call it together."""
        with warnings.catch_warnings():  # a rank without a batch has nothing to say, which is no fault
            warnings.filterwarnings("ignore", message=r"The ``compute`` method of metric \w+ was called before")
            return self.metric.compute()
