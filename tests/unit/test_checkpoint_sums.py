"""Checksums that are counted while files are written, without summing a tensor a second time."""

from __future__ import annotations

import io
import random
import zlib

import pytest
import torch
from trivet.checkpoint.sums import BLOCK, Summing, combined


@pytest.mark.parametrize("size", [0, 1, 5, 1000, 65_537, 4 << 20])
def test_two_parts_together(size: int) -> None:
    one, other = random.randbytes(77), random.randbytes(size)
    assert combined(zlib.crc32(one), zlib.crc32(other), size) == zlib.crc32(one + other)


def test_archives_are_summed_by_what_torch_says_of_them() -> None:
    file = io.BytesIO()
    summing = Summing(file, archives=True)
    for count in (1 << 20, 3, 5 << 18, 0):
        torch.save(torch.randn(count), summing)
    data = file.getvalue()
    assert summing.sum == {"size": len(data), "crc32": zlib.crc32(data)}


def test_what_does_not_look_like_an_archive_is_unknown() -> None:
    """And is read again by who wants to know."""
    for rest in (b"", b"x" * 16, b"PK\x07\x08" + b"\0" * 12):
        summing = Summing(io.BytesIO(), archives=True)
        summing.write(bytes(BLOCK))
        if rest:
            summing.write(rest)
        assert summing.sum is None


def test_where_torch_does_not_sum_we_do() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        file = io.BytesIO()
        summing = Summing(file, archives=True)
        torch.save(torch.randn(1 << 20), summing)
    finally:
        torch.serialization.set_crc32_options(True)
    assert summing.sum == {"size": len(file.getvalue()), "crc32": zlib.crc32(file.getvalue())}
