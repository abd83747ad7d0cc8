"""What ranks logged, joined in one collective: names are compared and values gathered at once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import TrivetError
from .slot import wide

if TYPE_CHECKING:
    from .launch.group import Group

HEADER = 4  # how many names, and a digest of them in three numbers that float32 holds exactly


class Packed:
    """Reduces what all ranks have under the same names: values and their weights.

    One all-gather per call, of a size that all ranks know before; names are compared by a digest in it. The room grows,
    on all ranks alike and with a second all-gather, where some rank has more names than fit.
    """

    def __init__(self, stage: str, group: Group) -> None:
        self.stage, self.group = stage, group
        self.room = 32
        self.without: list[str] = []  # endings of names that this rank had no batch for; "" where it had none at all

    def reduce(self, entries: Sequence[str], values: Tensor, weights: Sequence[float]) -> dict[str, float]:
        """Entry -> reduced value of all ranks; each begins with its reduction (`Slot.entry`), or with "object".

        All ranks call it together; the result is read on the host. A rank without a batch for some entries
        (``without``, or no entries at all) joins with nothing there. Raises TrivetError on all ranks where the others
        have different ones.
        """
        pairs = self._gather(entries, values, weights)
        if all(row[:HEADER] == pairs[0][:HEADER] for row in pairs):
            everyone = [list(entries)] * len(pairs)
        else:
            texts = self.group.exchange(f"metrics/{self.stage}", json.dumps([list(entries), self.without]))
            everyone = [json.loads(text)[0] for text in texts]
            self._refuse(everyone, [tuple(json.loads(text)[1]) for text in texts])
        shares: dict[str, list[tuple[float, float]]] = {}
        for row, names in zip(pairs, everyone, strict=True):
            for i, entry in enumerate(names):
                shares.setdefault(entry, []).append((row[HEADER + 2 * i], row[HEADER + 2 * i + 1]))
        return {entry: combine(entry.split(" ", 1)[0], found) for entry, found in shares.items()}

    def _refuse(self, everyone: list[list[str]], without: list[tuple[str, ...]]) -> None:
        """Raise where a rank lacks what another logged, unless that may be."""
        union = dict.fromkeys(entry for entries in everyone for entry in entries)
        needed = {e: e.split(" ", 3)[3] for e in union if not e.split(" ", 3)[2].endswith("?")}
        missing = [
            sorted(name for entry, name in needed.items() if entry not in entries and not name.endswith(excused))
            for entries, excused in zip(everyone, without, strict=True)
        ]
        told = [f"rank {rank} did not log {m}" for rank, m in enumerate(missing) if m and everyone[rank]]
        if told:
            raise TrivetError(
                f"ranks log different metrics in {self.stage}: {'; '.join(told)}. A value that is reduced over ranks "
                "must be logged on all of them, with the same options. Otherwise say sync_dist='sparse' to reduce it "
                "over those that do, or on_step=True, on_epoch=False to keep each rank's own."
            )

    def _gather(self, entries: Sequence[str], values: Tensor, weights: Sequence[float]) -> list[list[float]]:
        """By rank the header and the pairs."""
        digest = hashlib.blake2b(json.dumps(list(entries)).encode(), digest_size=6).digest()
        head = [float(len(entries)), *(float(int.from_bytes(digest[i : i + 2], "big")) for i in (0, 2, 4))]
        while True:
            gathered = self._all_gather(head, values, weights)
            everyone = gathered[:, : HEADER + 2 * len(entries)].tolist()  # the room is larger than what most need
            most = max(int(row[0]) for row in everyone)
            if most <= self.room:
                return everyone if most <= len(entries) else gathered.tolist()
            self.room = 1 << (most - 1).bit_length()

    def _all_gather(self, head: list[float], values: Tensor, weights: Sequence[float]) -> Tensor:
        world = self.group.world
        device = self.group.device
        values = values if device is None else values.to(device, wide(device))  # numbers of Python's are float64
        pairs = torch.stack([values, torch.tensor(weights, dtype=values.dtype, device=values.device)], 1).flatten()
        mine = values.new_zeros(HEADER + 2 * self.room)
        mine[:HEADER] = torch.tensor(head, dtype=values.dtype)
        if len(weights) <= self.room:
            mine[HEADER : HEADER + len(pairs)] = pairs
        out = mine.new_empty(world.world_size, len(mine))
        torch.distributed.all_gather(list(out.unbind()), mine)  # all ranks
        return out


def combine(fx: str, pairs: Sequence[tuple[float, float]]) -> float:
    """One value of all ranks': weighted sums divided by weights, or the sum, or the extreme."""
    values = [value for value, _ in pairs]
    if fx in ("min", "max"):
        if any(math.isnan(value) for value in values):
            return math.nan
        return (min if fx == "min" else max)(values)
    total = sum(values)
    if fx == "sum":
        return total
    weight = sum(weight for _, weight in pairs)
    return total / weight if weight else math.nan
