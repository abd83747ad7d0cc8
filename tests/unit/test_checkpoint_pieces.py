"""Files of tensors, read once: straight to where the elements belong, and summed on the way."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trivet.checkpoint import pieces, reader, sums, tensors
from trivet.checkpoint.archive import elements
from trivet.checkpoint.pieces import Piece, into, stretches
from trivet.errors import CheckpointError

FILE = "tensors/__0_0.distcp"


@pytest.mark.parametrize("seed", range(5))
def test_stretches_read_each_byte_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "ALONE", 10)
    monkeypatch.setattr(pieces, "THREADS", 4)
    cuts = sorted(random.Random(seed).sample(range(1000), 20))
    given = [Piece(a, b - a, lambda fill: None) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    for size in (1000, None):
        found = stretches(given[::-1], size)
        assert [one.end for one in found[:-1]] == [one.start for one in found[1:]]
        assert (found[0].start, found[-1].end) == ((0, 1000) if size else (cuts[0], cuts[-1]))
        assert [piece for one in found for piece in one.pieces] == given
        assert all(one.start <= piece.start and piece.end <= one.end for one in found for piece in one.pieces)
    assert sum(one.size for one in stretches([], 1000)) == 1000


def test_a_piece_that_fails_comes_behind_a_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "ALONE", 1 << 20)
    data = random.Random(0).randbytes(5 << 20)
    (tmp_path / "file").write_bytes(data)

    def refuse(fill: pieces.Fill) -> None:
        raise ValueError("not this")

    def found(crc32: int) -> bytes:
        memory = bytearray(2 << 20)
        with closing(sums.Checks(tmp_path, {"file": {"size": len(data), "crc32": crc32}})) as checks:
            checks.begin("file", [*into(memoryview(memory), 2_000_001), Piece(4_500_000, 1000, refuse)])
            with pytest.raises((CheckpointError, ValueError)) as caught:
                checks.wait()
            checks.begin("file")  # is done
            checks.wait()
        assert bytes(memory) == data[2_000_001 : 2_000_001 + len(memory)]
        return str(caught.value).encode()

    assert found(zlib.crc32(data)) == b"not this"
    assert b"file is damaged: its crc32 is" in found(1)


def other_layouts() -> dict[str, Tensor]:
    big = torch.randn(300, 400)
    return {
        "plain": big,
        "half": big.bfloat16(),
        "flags": big > 0,
        "transposed": torch.randn(400, 300).t(),
        "float8": big.to(torch.float8_e4m3fn).repeat(3, 1),
        "cube": torch.randn(70, 20, 100),
        "small": torch.randn(3),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.0),
    }


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Tensor]:
    values = other_layouts()
    (tmp_path / "tensors").mkdir()
    tensors.write(tmp_path / "tensors", values, distributed=False)
    return values


def read(place: Path, targets: dict[str, Tensor], before: Callable[[], object] | None = None) -> None:
    file = place / FILE
    found = {FILE: dict(sums.read_sum(file))} if before is None else {FILE: {"size": file.stat().st_size, "crc32": 0}}
    with closing(sums.Checks(place, found)) as checks:
        tensors.read(place / "tensors", tensors.metadata(place / "tensors"), targets, checks, before=before)


@pytest.mark.parametrize("kind", ["as it was", "another dtype", "another layout"])
def test_all_that_is_stored_comes_back_in_any_kind_of_tensor(
    kind: str, stored: dict[str, Tensor], tmp_path: Path
) -> None:
    targets = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in stored.items()}
    if kind == "another dtype":
        targets = {name: value.double() for name, value in targets.items()}
    if kind == "another layout":
        targets = {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in targets.items()}
    kept = {name: value.data_ptr() for name, value in targets.items()}
    read(tmp_path, targets)
    for name, value in stored.items():
        assert torch.equal(targets[name].double(), value.double()), name
        assert targets[name].data_ptr() == kept[name]


def test_large_elements_are_read_where_they_belong(
    stored: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch, which would copy, is asked only for what is small or odd."""
    asked: list[int] = []
    load = reader.load_plain
    monkeypatch.setattr(reader, "load_plain", lambda data, name: asked.append(len(data)) or load(data, name))
    read(tmp_path, {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in stored.items()})
    odd = {"transposed", "float8"}
    assert sum(size > reader.LARGE for size in asked) == len(odd)
    assert len(asked) == len(odd | {"flags", "small", "scalar"}) + 1  # and "none", or not


def test_nothing_changes_where_a_file_is_damaged(stored: dict[str, Tensor], tmp_path: Path) -> None:
    targets = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in stored.items()}
    called: list[int] = []
    with pytest.raises(CheckpointError, match=r"tensors/__0_0\.distcp is damaged"):
        read(tmp_path, targets, lambda: called.append(1))
    assert not called
    assert not any(value.double().any() for value in targets.values())


@pytest.mark.parametrize(
    ("offsets", "lengths"), [((5, 0, 0), (40, 20, 100)), ((5, 3, 0), (40, 10, 100)), ((0, 0, 7), (70, 20, 50))]
)
def test_a_part_of_a_stored_tensor(
    offsets: tuple[int, ...], lengths: tuple[int, ...], stored: dict[str, Tensor], tmp_path: Path
) -> None:
    """As a rank wants it that holds another part than the one that wrote."""
    index = tensors.metadata(tmp_path / "tensors")
    place = next(place for key, place in index.storage_data.items() if key.fqn == "cube")
    target = torch.zeros(lengths)
    part = reader.Part("cube", offsets, lengths, target)
    archive = reader.Archive(place.offset, place.length, torch.float32, [part])
    with closing(sums.Checks(tmp_path, {FILE: {"size": (tmp_path / FILE).stat().st_size}})) as checks:
        checks.begin(FILE, list(reader.pieces(tmp_path / FILE, [archive])))
        checks.wait()
    assert torch.equal(target, stored["cube"][part.box])


def test_an_archive_that_is_not_what_the_index_says_is_left_to_torch(stored: dict[str, Tensor], tmp_path: Path) -> None:
    index = tensors.metadata(tmp_path / "tensors")
    place = next(place for key, place in index.storage_data.items() if key.fqn == "plain")
    data = (tmp_path / FILE).read_bytes()
    with open(tmp_path / FILE, "rb") as file:
        found = elements(file, place.offset, place.length, "float32")
        assert found is not None
        assert found.shape == (300, 400)
        assert data[found.start : found.start + 480_000] == stored["plain"].numpy().tobytes()
        assert elements(file, place.offset, place.length, "int32") is None
        assert elements(file, place.offset, place.length - 1, "float32") is None
