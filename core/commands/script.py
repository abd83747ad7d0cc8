"""Script: what a user's own script fixes of the commands that it gets from `trivet.cli`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .slots import Slot

if TYPE_CHECKING:
    import jsonargparse

    from ..trainer import Trainer
    from .job import Job
    from .links import Links


_PLAIN = (str, int, Mapping)


@dataclass(frozen=True)
class Script:
    """See `trivet.cli`, whose arguments these are; ``trivet`` itself fixes nothing.

    Beside those: ``defaults`` are like a configuration file below all others; ``extend`` may add arguments to the
    parser (`Job.values` has what they were given); ``on_ready`` is called when everything is made, before it runs;
    ``spellings`` bring what a slot is filled with, by its key, into our words. ``make_trainer`` is given the Trainer's
    arguments, and ``methods``, by command, are called by keyword in the place of the Trainer's.
    """

    model: Any = None
    data: Any = None
    subclasses: bool = False
    trainer_class: Callable[..., Trainer] | None = None
    trainer_defaults: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    links: Links = field(default_factory=dict)
    extend: Callable[[jsonargparse.ArgumentParser], None] | None = None
    save_config: bool = True
    on_ready: Callable[[Job], None] | None = None
    spellings: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    make_trainer: Callable[[dict[str, Any]], Trainer] | None = None
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def fixed(self) -> dict[str, Callable[..., Any]]:
        """The classes that no flag chooses."""
        given = {"model": self.model, "data": self.data}
        return {} if self.subclasses else {key: cls for key, cls in given.items() if cls is not None}

    def objects(self, slot: Slot) -> list[Any]:
        """The objects, as opposed to names and mappings, among this script's defaults for a slot."""
        return [one for one in self._defaults(slot.key) if not isinstance(one, _PLAIN)]

    def layer(self, slots: Mapping[str, Slot]) -> dict[str, Any]:
        """The other defaults for slots, below configuration files."""
        found: dict[str, Any] = dict(self.defaults)
        for key, slot in slots.items():
            plain = [one for one in self._defaults(key) if isinstance(one, _PLAIN)]
            if plain:
                found[key] = plain if slot.several and plain[0] not in (True, False) else plain[0]
        return found

    def _defaults(self, key: str) -> list[Any]:
        given = self.trainer_defaults.get(key)
        return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]

    def slots(self, found: Mapping[str, Slot]) -> dict[str, Slot]:
        """The slots, in which only subclasses of the script's classes fit."""
        given = {"model": self.model, "data": self.data} if self.subclasses else {}
        return {
            key: replace(slot, base=given.get(key) or slot.base, spell=self.spellings.get(key))
            for key, slot in found.items()
        }
