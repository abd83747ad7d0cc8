"""Hostile and damaged checkpoints: a clear error, nothing run, nothing changed in memory."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import trivet
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from trivet import capture
from trivet.callbacks.callback import Callback
from trivet.callbacks.checkpoint import Checkpoint
from trivet.checkpoint import directory, sums
from trivet.errors import CheckpointError


class Net(trivet.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.tied = nn.Linear(3, 2)
        self.tied.weight = self.layer.weight
        self.register_buffer("offset", torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.tied(batch[0]) + self.layer(batch[0]) + self.offset).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["bytes"] = self.layer.weight.detach().numpy().tobytes()  # what to look for in a file

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Counter(Callback):
    """A callback with state, that trusts it."""

    def __init__(self) -> None:
        self.count = 0

    def on_update_end(self, trainer: Any, module: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 0


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12.0).view(4, 3)), 2)


def make_trainer(**options: Any) -> trivet.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "strategy": "single"}
    return trivet.Trainer(**{**quiet, "max_epochs": 2, "enable_checkpointing": False, **options})


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a real run."""
    place = tmp_path_factory.mktemp("good")
    save = Checkpoint(place, filename="one")
    make_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[save, Counter()]).fit(Net(), loader())
    return place / "one"


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "place/one"))


# ------------------------------------------------------------------------------------------------------------ mutations


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((path / "manifest.json").read_text())
    change(values)
    (path / "manifest.json").write_text(json.dumps(values))


def list_again(path: Path, *names: str) -> None:
    """Let the manifest agree with the files, as somebody who means harm would."""
    edit_manifest(path, lambda values: values["files"].update({n: dict(sums.read_sum(path / n)) for n in names}))


def manifest(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "manifest.json").write_text(text)


def listed(name: str) -> Callable[[Path], None]:
    return lambda path: edit_manifest(path, lambda values: values["files"].update({name: {"size": 1}}))


def values(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit_manifest(path, lambda found: found.update(changes))


def index(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A change of DCP's Metadata."""

    def mutate(path: Path) -> None:
        file = path / "tensors/.metadata"
        metadata = pickle.loads(file.read_bytes())
        change(metadata)
        file.write_bytes(pickle.dumps(metadata))
        list_again(path, "tensors/.metadata")

    return mutate


def place_of(metadata: Any, name: str) -> Any:
    return next(place for key, place in metadata.storage_data.items() if key.fqn == name)


def placed(**changes: Any) -> Callable[[Path], None]:
    return index(lambda m: vars(place_of(m, "module/layer.weight")).update(changes))


def shaped(*shape: int) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["module/layer.weight"]
        entry.size = entry.chunks[0].sizes = torch.Size(shape)

    return index(change)


def chunks(*parts: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in parts]
        metadata.state_dict_metadata["module/layer.weight"].chunks = found

    return index(change)


def state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def mutate(path: Path) -> None:
        plain = torch.load(path / "state.pt", weights_only=True)
        change(plain)
        torch.save(plain, path / "state.pt")
        list_again(path, "state.pt")

    return mutate


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("exploded",))


def bomb(name: str) -> Callable[[Path], None]:
    def mutate(path: Path) -> None:
        if name == "state.pt":
            torch.save({"progress": Bomb()}, path / name)
        else:
            data = pickle.dumps(Bomb())
            size = (path / name).stat().st_size
            (path / name).write_bytes(data + b"\0" * (size - len(data)))
        list_again(path, name)

    return mutate


def elsewhere(path: Path) -> None:
    shard = next((path / "tensors").glob("*.distcp"))
    outside = path.parent.parent / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)


def extra(path: Path) -> None:
    (path / "tensors/__7_0.distcp").write_bytes(b"x")


def extra_and_listed(path: Path) -> None:
    extra(path)
    list_again(path, "tensors/__7_0.distcp")


def truncated(path: Path) -> None:
    shard = next((path / "tensors").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)


def flipped(path: Path) -> None:
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


def flipped_in_shard(path: Path) -> None:
    """One bit of the elements of a weight, where no format would notice."""
    shard = next((path / "tensors").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    place = data.index(torch.load(path / "state.pt", weights_only=True)["user"]["bytes"])
    data[place + 1] ^= 1
    shard.write_bytes(data)


def optimizer(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return state(lambda plain: change(plain["optimizers"][0]))


def wrong_moment(path: Path) -> None:
    """The first moment of a weight, of the shape of a bias."""

    def change(metadata: Any) -> None:
        for names in (metadata.state_dict_metadata, metadata.storage_data):
            for key in list(names):
                if getattr(key, "fqn", key) == "optimizer/0/layer.weight/exp_avg":
                    del names[key]
        bias, moment = "optimizer/0/layer.bias/exp_avg", "optimizer/0/layer.weight/exp_avg"
        metadata.state_dict_metadata[moment] = metadata.state_dict_metadata[bias]
        key, place = next((k, p) for k, p in metadata.storage_data.items() if k.fqn == bias)
        metadata.storage_data[type(key)(moment, key.offset, key.index)] = place

    index(change)(path)


DEEP = "[" * 100_000 + "]" * 100_000
MUTATIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "not json": (manifest("{nothing"), "bad manifest.json"),
    "no object": (manifest("[1, 2]"), "its format is not"),
    "not text": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "bad manifest.json"),
    "deep nesting": (manifest('{"format": ' + DEEP + "}"), "bad manifest.json"),
    "not a number": (values(metrics={"a": float("nan")}), "NaN is no number"),
    "a later version": (values(version=99), "its format version is 99"),
    "no version": (values(version=True), "its version is True"),
    "a negative size": (values(files={"state.pt": {"size": -1}}), "file 'state.pt' has the entry"),
    "up and out": (listed("../../secret"), "leaves the directory"),
    "absolute": (listed("/etc/passwd"), "leaves the directory"),
    "a link that leaves": (elsewhere, "is a link that leaves the directory"),
    "no state": (lambda path: (path / "state.pt").unlink(), "state.pt is missing"),
    "no index": (lambda path: (path / "tensors/.metadata").unlink(), ".metadata is missing"),
    "no shard": (lambda path: (path / "tensors/__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "half a shard": (truncated, "bytes instead of"),
    "one more shard": (extra, "__7_0.distcp is not in the manifest"),
    "one more shard, listed": (extra_and_listed, "knows nothing of the file '__7_0.distcp'"),
    "a flipped bit": (flipped, "state.pt is damaged"),
    "a flipped bit in a shard": (flipped_in_shard, "tensors/__0_0.distcp is damaged: its crc32 is"),
    "a bomb in the state": (bomb("state.pt"), "cannot be loaded as plain data"),
    "a bomb in the index": (bomb("tensors/.metadata"), "not part of the format"),
    "a bomb in a shard": (bomb("tensors/__0_0.distcp"), "cannot read checkpoint"),
    "an index of something else": (index(lambda m: vars(m).update(state_dict_metadata=3)), "index is damaged"),
    "no tensor": (index(lambda m: m.state_dict_metadata.update({"a": "b"})), "lists 'a', which is not a tensor"),
    "a tensor less": (index(lambda m: m.state_dict_metadata.pop("module/offset")), "missing in the checkpoint"),
    "a negative offset": (placed(offset=-8), "lies at -8"),
    "an offset behind the end": (placed(offset=1 << 40), "outside of '__0_0.distcp'"),
    "a length behind the end": (placed(length=1 << 40), "outside of '__0_0.distcp'"),
    "no number": (placed(offset="8"), "lies at '8'"),
    "a file elsewhere": (placed(relative_path="../state.pt"), "which the manifest lacks"),
    "a transformed tensor": (placed(transform_descriptors=["zip"]), "is transformed by"),
    "a tensor of many terabytes": (shaped(1 << 40, 1 << 10), "more than the .* bytes that are there"),
    "a negative shape": (shaped(-2, 3), "has the shape"),
    "another shape": (shaped(3, 2), r"has shape \(3, 2\), the module's has \(2, 3\)"),
    "a part outside": (chunks(((0, 0), (4, 3))), "outside of it"),
    "a part missing": (chunks(((0, 0), (1, 3))), "is not made up of its 1 parts"),
    "state of another kind": (state(lambda plain: plain.update(callbacks=[1])), "expected a dict of dicts"),
    "a field too few": (state(lambda plain: plain.pop("seed")), "expected"),
    "progress that is none": (state(lambda plain: plain["progress"].update(update=float("nan"))), "numbers"),
    "a callback's state": (state(lambda plain: plain["callbacks"]["Counter"].pop("count")), "KeyError: 'count'"),
    "no optimizer": (state(lambda plain: plain["optimizers"].clear()), "holds 0 optimizers"),
    "a scheduler": (state(lambda plain: plain["schedulers"].append({})), "holds 1 schedulers"),
    "optimizer state": (optimizer(lambda one: one.pop("tensors")), "its optimizer state is damaged"),
    "no group": (optimizer(lambda one: one["groups"].clear()), "has 0 parameter groups"),
    "another group": (optimizer(lambda one: one["groups"][0]["params"].pop()), "parameter group 0 differs"),
    "a rate that is none": (optimizer(lambda one: one["groups"][0].update(lr="hi")), "lr is 'hi', expected a number"),
    "no batches": (state(lambda plain: plain["data"].update(batches_per_update=0)), "batches_per_update is 0"),
    "a position before": (state(lambda plain: plain["data"].update(position=-3)), "position is -3, expected"),
    "a position behind the end": (
        state(lambda plain: plain["data"].update(position=10**9, epoch=1)),
        "stands at 1000000000 samples in its epoch, and the epoch has 4",
    ),
    "a position in another epoch": (
        state(lambda plain: plain["data"].update(epoch=7)),
        "it is in epoch 7, and 1 epochs are completed",
    ),
    "another progress": (values(progress={"update": 10**9}), "state.pt holds the progress .* and manifest.json says"),
    "a wrong moment": (wrong_moment, r"'exp_avg' of 'layer.weight' has shape \(2,\), and the parameter \(2, 3\)"),
}
VALIDATED = {"not json", "a flipped bit in a shard", "half a shard", "a bomb in the index", "another shape"}  # too
VALIDATED |= {"a link that leaves"}


def memory(module: nn.Module, counter: Counter) -> list[Any]:
    weights = [tensor.clone() for tensor in module.state_dict().values()]
    numpy = [torch.from_numpy(np.random.get_state()[1].astype(np.int64))]
    return [*weights, torch.get_rng_state(), *numpy, random.getstate(), counter.count]


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bad_checkpoint_is_refused_and_changes_nothing(
    name: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    mutate, reason = MUTATIONS[name]
    mutate(copy)
    module, counter = Net(), Counter()
    counter.count = 5
    trainer = make_trainer(callbacks=[counter])
    before = memory(module, counter)
    with pytest.raises(CheckpointError, match=reason) as caught:
        trainer.fit(module, loader(), ckpt_path=copy)
    assert str(copy) in str(caught.value)
    assert all(map(same, before, memory(module, counter)))
    if name in VALIDATED:
        with pytest.raises(CheckpointError, match=reason):
            trainer.validate(module, loader(), ckpt_path=copy, verbose=False)
        assert all(map(same, before, memory(module, counter)))
    assert not Path("exploded").exists()


def sharded_with_a_damaged_part(place: Path) -> tuple[str, bool]:
    """Task of two: a bit of what rank 1 alone reads is flipped. The error, and whether this rank's part stayed."""
    options: dict[str, Any] = {"strategy": "fsdp", "devices": 2, "max_epochs": 1}
    save = Checkpoint(place, filename="one")
    make_trainer(**options, enable_checkpointing=True, callbacks=[save]).fit(Square(), loader())
    rank = int(os.environ["RANK"])
    if rank == 0:
        shard = place / "one/tensors/__1_0.distcp"
        data = bytearray(shard.read_bytes())
        start = data.index(b"archive/data/0") + 64
        data[start + next(n for n, byte in enumerate(data[start:]) if byte)] ^= 1
        shard.write_bytes(data)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    given = capture.template

    def template(run: Any) -> Any:
        found = given(run)
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in found.module.values()]
        seen.extend((part, part.clone()) for part in parts)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "template", template)
        try:
            make_trainer(**{**options, "max_epochs": 2}).fit(Square(), loader(), ckpt_path=place / "one")
        except Exception as error:
            return f"{type(error).__name__}: {error}", bool(seen) and all(torch.equal(a, b) for a, b in seen)
    return "nothing", False


class Square(Net):
    """Every weight is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = self.layer = nn.Linear(3, 4, bias=False)
        self.offset = torch.ones(4)
        self.register_parameter("bias", nn.Parameter(torch.rand(4)))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


def test_a_damaged_part_of_one_rank_changes_none(tmp_path: Path) -> None:
    first, second = ranks.on_two_ranks(sharded_with_a_damaged_part, tmp_path)
    assert "tensors/__1_0.distcp is damaged: its crc32 is" in second[0]
    assert "__1_0.distcp is damaged" in first[0]
    assert (first[1], second[1]) == (True, True)


def test_the_unchanged_checkpoint_is_good(copy: Path) -> None:
    module, counter = Net(), Counter()
    trainer = make_trainer(callbacks=[counter])
    trainer.fit(module, loader(), ckpt_path=copy)
    assert (trainer.progress.update, counter.count) == (4, 4)


def test_a_huge_shape_is_refused_before_it_is_allocated(copy: Path) -> None:
    shaped(1 << 40, 1 << 10)(copy)
    for read in (directory.read, directory.read_weights):
        with pytest.raises(CheckpointError, match="more than the"):
            read(copy)


def test_many_small_names_for_the_same_bytes_are_refused(copy: Path) -> None:
    """What is stored once and named a thousand times would need a thousand times the memory."""

    def change(metadata: Any) -> None:
        key, place = next((k, p) for k, p in metadata.storage_data.items() if k.fqn == "module/layer.weight")
        for number in range(9):
            metadata.state_dict_metadata[f"module/{number}"] = metadata.state_dict_metadata["module/layer.weight"]
            metadata.storage_data[type(key)(f"module/{number}", key.offset, 0)] = place

    index(change)(copy)
    with pytest.raises(CheckpointError, match=r"tensor index wants .* bytes of '__0_0.distcp', which has"):
        directory.read_weights(copy)


def test_overlapping_parts_are_refused(copy: Path) -> None:
    """Two parts that add up to the right size, and leave a hole."""

    def change(metadata: Any) -> None:
        chunks_of = metadata.state_dict_metadata["module/layer.weight"]
        key, place = next((k, p) for k, p in metadata.storage_data.items() if k.fqn == "module/layer.weight")
        half = torch.Size((1, 3))
        chunks_of.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), half) for _ in range(2)]
        metadata.storage_data[type(key)("module/layer.weight", torch.Size((0, 0)), 1)] = place

    index(change)(copy)
    with pytest.raises(CheckpointError, match="is not made up of its 2 parts"):
        directory.read_weights(copy)


def test_a_manifest_without_checksums_is_read(copy: Path) -> None:
    """As Trivet wrote them before it had checksums."""
    edit_manifest(copy, lambda found: [entry.pop("crc32") for entry in found["files"].values()])
    assert set(directory.read_weights(copy)) == set(Net().state_dict())
    assert directory.complete(copy)


def test_a_link_to_a_checkpoint_is_a_checkpoint(copy: Path) -> None:
    link = copy.parent / "link"
    link.symlink_to(copy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert directory.complete(link)
        directory.read_weights(link)
