"""What a loader is able to do, asked once and here, and which part of the data a rank reads."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from ..errors import ConfigurationError, DataError
from .loader_copy import copy_loader


@runtime_checkable
class OwnsPosition(Protocol):
    """A loader that knows where it stands, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@runtime_checkable
class Shards(Protocol):
    """An iterable data set that can give one rank's part of itself."""

    def shard(self, *, rank: int, world_size: int) -> Any: ...


@runtime_checkable
class KnowsEpoch(Protocol):
    """A sampler or data set that is told the epoch."""

    def set_epoch(self, epoch: int, /) -> Any: ...


@runtime_checkable
class HasSampler(Protocol):
    """A batch sampler that draws from a sampler."""

    sampler: Any


@runtime_checkable
class HasReplicas(Protocol):
    """A sampler that deals among ranks itself, as torch's DistributedSampler does."""

    num_replicas: int


@dataclass(frozen=True)
class AlreadySharded:
    """A loader of which every rank has its own part. Made by `already_sharded`."""

    loader: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def already_sharded(loader: Any) -> AlreadySharded:
    """Declare that ``loader`` gives each rank its own part of the data, so that Trivet reads it as it is.

    Then nobody but the loader is responsible for the ranks' parts being disjoint.
    """
    return loader if isinstance(loader, AlreadySharded) else AlreadySharded(loader)


def is_indexed(loader: Any) -> bool:
    """Whether the core can deal the samples of this loader: a torch DataLoader over data that is read by index."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader, OwnsPosition)
    )


def index_source(loader: DataLoader[Any]) -> Any:
    """What the loader draws indices from: the batch sampler or, with ``batch_size=None``, the sampler."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """The objects that decide about order, by the name of the attribute that leads to them."""
    source = index_source(loader)
    if loader.batch_sampler is None:
        return {"sampler": source}
    found = {"batch_sampler": source}
    if isinstance(source, HasSampler):
        found["sampler"] = source.sampler
    return found


def refuse_distributed_samplers(loader: DataLoader[Any], world_size: int) -> None:
    """Raise DataError where a sampler of the loader deals among ranks, which Trivet does itself."""
    for name, sampler in samplers(loader).items():
        if isinstance(sampler, HasReplicas) and (world_size > 1 or sampler.num_replicas != 1):
            raise DataError(
                f"the loader's {name} is a {type(sampler).__name__} with num_replicas={sampler.num_replicas!r}, which "
                f"deals samples among ranks, and so does Trivet (world size {world_size}): samples would be lost. Pass "
                "the plain sampler (shuffle=True, or what it wraps), or, to keep its dealing, "
                "trivet.data.sharding.already_sharded(loader)."
            )


def local_part(loader: Any, rank: int, world_size: int) -> Any:
    """What this rank reads of a loader whose samples cannot be dealt by index: a loader, or any iterable.

    Raises DataError where ranks would read the same samples.
    """
    if isinstance(loader, AlreadySharded):
        return loader.loader
    if world_size == 1:
        return loader
    if isinstance(loader, OwnsPosition):
        raise DataError(
            f"{type(loader).__name__} owns its position (it has state_dict), so its samples cannot be dealt among "
            f"{world_size} processes. Let it read only its own rank's part and pass "
            "trivet.data.sharding.already_sharded(loader), or use torch.utils.data.DataLoader."
        )
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, Shards):
        shard = loader.dataset.shard
        try:
            inspect.signature(shard).bind(rank=rank, world_size=world_size)
        except TypeError as error:
            raise DataError(
                f"{type(loader.dataset).__name__}.shard{inspect.signature(shard)} does not take (rank=, world_size=): "
                f"{error}. Give it these arguments, or shard the data yourself and pass "
                "trivet.data.sharding.already_sharded(loader)."
            ) from None
        return copy_loader(loader, dataset=shard(rank=rank, world_size=world_size))
    what = f"{type(loader.dataset).__name__} (iterable)" if isinstance(loader, DataLoader) else type(loader).__name__
    raise DataError(
        f"{what} is not read by index, so {world_size} processes would all read the same samples. Either give the data "
        "set a method shard(rank=..., world_size=...) that returns one rank's part, or let it read only its own part "
        "and pass trivet.data.sharding.already_sharded(loader)."
    )


def known_length(source: Any) -> int | None:
    """The length of a loader or sampler, where it has one."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def limited(limit: int | float | None, length: int | None, world_size: int, text: str) -> int | None:
    """The user's batches of all ranks that ``limit`` allows: a count per rank, or a fraction of the epoch's batches."""
    if limit is None or isinstance(limit, int):
        return None if limit is None else limit * world_size
    if limit == 1.0:
        return None
    if length is None:
        raise DataError(f"the limit {limit!r} is a fraction of an epoch without a known length: {text}. Give a count.")
    batches = int(length * limit)
    if limit and length and not batches:
        raise DataError(f"the limit {limit!r} of {length} batches is none. Use 1 for one batch: {text}.")
    return batches


def describe(loader: Any) -> str:
    """A loader in words, for errors: class, data set, length, batch size."""
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    length = known_length(loader.dataset)
    samples = "" if length is None else f" with {length} samples"
    return (
        f"{type(loader).__name__} over {type(loader.dataset).__name__}{samples}, "
        f"batch_size={loader.batch_size!r}, drop_last={loader.drop_last!r}"
    )


def derive_accumulation(global_batch_size: int, batch_size: int | None, world_size: int) -> int:
    """How many micro-batches per rank and update make ``global_batch_size`` samples.

    Raises ConfigurationError that names the possible values where there is no such number.
    """
    if batch_size is None:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size!r} needs a loader with a known batch_size; this one has a batch "
            "sampler of its own or none. Use accumulate_grad_batches instead."
        )
    unit = batch_size * world_size
    count, rest = divmod(global_batch_size, unit)
    if rest or count < 1:
        near = [unit] if count < 1 else [count * unit, (count + 1) * unit]
        sizes = [
            size
            for size in range(1, global_batch_size // world_size + 1)
            if not global_batch_size % (size * world_size)
        ]
        other = f", or a loader with batch_size {' or '.join(map(str, sizes[-3:]))}" if sizes else ""
        raise ConfigurationError(
            f"global_batch_size={global_batch_size!r} is not a multiple of batch_size {batch_size} x {world_size} "
            f"processes = {unit}. Possible: multiples of {unit}, such as {' or '.join(map(str, near))}{other}."
        )
    return count
