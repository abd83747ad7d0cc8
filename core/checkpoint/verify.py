"""Whether every byte of a checkpoint is what was written. Needs no torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import CheckpointError
from . import manifest as manifests
from .files import Place
from .index import read_index
from .sums import difference, read_sum


@dataclass(frozen=True)
class Verified:
    """What was looked at, and what is wrong with it. ``unsummed``: files that were written without a checksum."""

    files: int
    size: int
    problems: tuple[str, ...]
    unsummed: int


def verify(directory: Place) -> Verified:
    """Compare the files with their sizes and checksums, and the tensor index with the files."""
    try:
        values = manifests.read(directory)
    except CheckpointError as error:
        return Verified(0, 0, (str(error).partition("cannot read checkpoint ")[2].partition(": ")[2] or str(error),), 0)
    wrong = manifests.problems(directory, values)
    files = values["files"]
    summed = [name for name, entry in files.items() if "crc32" in entry and (directory / name).is_file()]
    with ThreadPoolExecutor() as threads:
        for name, found in zip(summed, threads.map(read_sum, (directory / name for name in summed)), strict=True):
            text = difference(name, files[name], found)
            if text and found["size"] == files[name]["size"]:  # the others are told already
                wrong.append(text)
    if not wrong:
        try:
            read_index(directory, files)
        except CheckpointError as error:
            wrong.append(str(error))
    unsummed = sum("crc32" not in entry for entry in files.values())
    return Verified(len(files), sum(entry["size"] for entry in files.values()), tuple(wrong), unsummed)
