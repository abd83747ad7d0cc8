"""The verdict on ranks of which none gets on: who is waited for, or which collectives do not belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .place import Place

HANG, MISMATCH = "Hang", "CollectiveMismatch"

# what a backward may be in, where collectives are begun in C++
_IN_BACKWARD = ("backward", "all_reduce", "reduce_scatter_tensor")
_MOST_NAMED = 4


@dataclass(frozen=True)
class Verdict:
    """Which rank fails, with what type and text; ``stack`` is that rank's."""

    rank: int
    kind: str
    text: str
    stack: str = ""


def certain(places: Mapping[int, Place], world_size: int) -> Verdict | None:
    """What can be said without waiting any longer: no time would bring these ranks together."""
    for place in places.values():
        if place.guarded and _collective(place):
            text = f"a collective inside trivet.rank_zero, where the other ranks never come: {place}. Call it outside"
            return Verdict(place.rank, MISMATCH, f"{text}, on all ranks.", place.stack)
    if len(places) < world_size or not all(map(_collective, places.values())):
        return None
    if any(place.compares for place in places.values()):
        return None
    ordered = [places[rank] for rank in sorted(places)]
    odd = next((place for place in ordered[1:] if not _may_meet(ordered[0], place)), None)
    return None if odd is None else mismatch(ordered[0], odd)


def mismatch(one: Place, other: Place) -> Verdict:
    """Two that cannot meet; the blame is on the one that a line of the user's called."""
    if one.waits == "backward":
        one, other = other, one
    text = (
        f"ranks call different collectives, and each waits for the other: {one}, but {other}. All ranks have to call "
        "the same ones in the same order."
    )
    return Verdict(one.rank, MISMATCH, text, one.stack)


def of(places: Mapping[int, Place], world_size: int, seconds: float) -> Verdict:
    """Who is waited for, where nothing has happened for so many seconds. Ranks that are missing did not answer."""
    if (found := certain(places, world_size)) is not None:
        return found
    begin = f"nothing happened for {seconds:.3g} s (timeout)"
    if silent := sorted(set(range(world_size)) - set(places)):
        rank = silent[0]
        text = f"{begin}, and rank {rank} does not answer: code of it that is not Python's holds it up, it is stopped"
        return Verdict(rank, HANG, f"{text} (SIGSTOP), or it is gone. {_others(places, rank)}")
    fewest = min(place.calls for place in places.values())
    behind = [place for place in places.values() if place.calls == fewest and not _collective(place)]
    behind = behind or [place for place in places.values() if not _collective(place)]
    behind = behind or [place for place in places.values() if place.calls == fewest]
    culprit = max(behind, key=lambda place: (place.still, -place.rank))
    everywhere = len(behind) == len(places) > 1 and _collective(culprit)
    if everywhere:
        text = f"{begin}: all ranks wait in the same collective, so the network or a device does not get on: {culprit}"
        return Verdict(culprit.rank, HANG, f"{text}.", culprit.stack)
    if _collective(culprit) and len(places) > 1:
        return mismatch(culprit, next(place for place in places.values() if place.calls > fewest))
    return Verdict(culprit.rank, HANG, f"{begin}: {culprit}. {_others(places, culprit.rank)}".rstrip(), culprit.stack)


def _collective(place: Place) -> bool:
    return place.plain or place.exchanges or place.waits == "backward"


def _may_meet(one: Place, other: Place) -> bool:
    """Whether two ranks that wait may be in the same collective, or in two that end one after the other."""
    if one.exchanges or other.exchanges:
        if one.exchanges and other.exchanges:
            return one.waits == other.waits
        exchange, collective = (one, other) if one.exchanges else (other, one)
        # the collective is one that the other rank has not begun, and will not while it waits
        return exchange.calls >= collective.calls
    if one.calls != other.calls:
        return True  # one may be late with what the other has ended
    if "backward" in (one.waits, other.waits):
        return one.waits in _IN_BACKWARD and other.waits in _IN_BACKWARD
    return one.waits == other.waits


def _others(places: Mapping[int, Place], rank: int) -> str:
    others = [str(place) for place in places.values() if place.rank != rank]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return f"Beside it: {'; '.join(others[:_MOST_NAMED])}{more}." if others else ""
